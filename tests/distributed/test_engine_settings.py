"""Distributed settings reach the engine: checked in the running process and in the collectives that it calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.config import load_config
from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.process_group import export_settings, kept_variables, settings_to_export
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import CURVE, difference
from tests.helpers.forked_runs import ForkedRuns

DEFAULTS = DistributedConfig(nccl={})
HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
SHORT = ["train.steps=4", "validation.every=0", "checkpoint.every_steps=0"]


Probe = Callable[..., dict[str, Any]]


@pytest.fixture
def probe(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> Probe:
    """Run two processes of an engine with these settings: the facts of rank 0."""

    def facts(engine: str, *settings: str) -> dict[str, Any]:
        out = tmp_path / "facts.json"
        given = (parity_config, "guard.verify_updates_every=0", *SHORT, *settings)
        forked.succeed(engine, tmp_path / "run", 2, *given, script="engine_probe.py", PROBE=str(out))
        return json.loads(out.read_text())

    return facts


def test_ddp_defaults(probe: Probe) -> None:
    facts = probe("ddp")
    assert facts["timeout_s"] == 120 and facts["parameters"] == ["torch.float32"]
    assert (facts["find_unused_parameters"], facts["static_graph"], facts["broadcast_buffers"]) == (False, True, False)
    assert facts["gradient_as_bucket_view"] is True and facts["bucket_bytes_cap"] == 25 * 2**20
    assert facts["environment"]["NCCL_SOCKET_NTHREADS"] == "4"
    assert facts["environment"]["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1800"
    assert facts["held"] == pytest.approx(16, rel=0.05)
    # No gradient is exchanged inside the accumulation.
    for step in facts["steps"]:
        first, last = step["in_backward"]
        assert first == 0 and last > 0


@pytest.mark.setting(
    "distributed.timeout_s",
    "distributed.heartbeat_timeout_s",
    "distributed.blocking_wait",
    "distributed.async_error_handling",
    "distributed.flight_recorder",
    "distributed.nccl",
    "distributed.ddp.find_unused_parameters",
    "distributed.ddp.gradient_as_bucket_view",
    "distributed.ddp.broadcast_buffers",
    "distributed.ddp.static_graph",
    "distributed.ddp.bucket_cap_mb",
)
def test_ddp_settings_changed(probe: Probe) -> None:
    facts = probe(
        "ddp",
        "distributed.ddp={find_unused_parameters: true, static_graph: false, gradient_as_bucket_view: false, "
        "broadcast_buffers: true, bucket_cap_mb: 1}",
        "distributed.timeout_s=77",
        "distributed.heartbeat_timeout_s=99",
        "distributed.blocking_wait=true",
        "distributed.async_error_handling=false",
        "distributed.flight_recorder=false",
        "distributed.nccl={NCCL_SOCKET_NTHREADS: 2, NCCL_IB_DISABLE: 1}",
    )
    assert facts["timeout_s"] == 77
    assert (facts["find_unused_parameters"], facts["static_graph"], facts["broadcast_buffers"]) == (True, False, True)
    assert facts["gradient_as_bucket_view"] is False and facts["bucket_bytes_cap"] == 2**20
    expected = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "99",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_FR_BUFFER_SIZE": "0",
        "NCCL_SOCKET_NTHREADS": "2",
        "NCCL_IB_DISABLE": "1",
    }
    assert expected.items() <= facts["environment"].items()
    assert "NCCL_NSOCKS_PERTHREAD" not in facts["environment"]


def test_variables_of_the_user_stay(probe: Probe, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """As they are set to debug a hang; those that an earlier run in the same process has set are not the user's."""
    variables = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0", "NCCL_NSOCKS_PERTHREAD": "4"}
    forked.succeed("ddp", tmp_path / "run", 2, parity_config, *SHORT, **variables)
    report = json.loads((tmp_path / "run/startup.json").read_text())
    for name, kept, ours in (("TORCH_NCCL_BLOCKING_WAIT", "1", "0"), ("TORCH_NCCL_ENABLE_MONITORING", "0", "1")):
        (notice,) = (notice for notice in report["notices"] if notice.startswith(f"{name}: "))
        assert re.findall(r"\d", notice) == [kept, ours], notice
    assert "NSOCKS" not in "".join(report["notices"])


@pytest.mark.parametrize(
    ("engine", "in_first"),
    [("fsdp2", 0), ("zero1", 0), ("zero2", 1), pytest.param("zero3", 1, marks=pytest.mark.slow)],
)
def test_sharded_engines(engine: str, in_first: int, probe: Probe) -> None:
    """The group's timeout is ours under each; ZeRO-2 and 3 exchange gradients with each micro-batch by design.

    What is held for a parameter is what docs/engines.md says.
    """
    facts = probe(engine)
    assert set(facts["timeouts_s"]) == {120}, "of groups that libraries create as well"
    if engine != "zero3":  # its buckets are larger than this model
        assert facts["held"] == pytest.approx(16 / 2 if engine == "fsdp2" else 4 + 16 / 2, rel=0.05)
    if engine == "fsdp2":
        assert facts["fsdp_modules"] == ["", "blocks.0", "blocks.1"] and facts["parameters"] == ["torch.float32"]
    reductions = [step["in_backward"][0] > (2 if engine == "fsdp2" else 0) for step in facts["steps"][1:]]
    assert reductions == [bool(in_first)] * 3, facts["steps"]


@pytest.mark.setting("distributed.ddp.comm_hook")
def test_communication_hooks(
    parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    """Compressed gradients: another curve, and nearly the same."""
    forked.succeed("ddp", tmp_path / "run", 2, parity_config, "distributed.ddp.comm_hook=fp16")
    assert 1e-7 < difference(tmp_path / "run", single(), CURVE[:1]) < 0.01


def test_hook_unsupported_by_gloo_is_refused(
    parity_config: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns, tmp_path: Path
) -> None:
    ranks = two_ranks("ddp", parity_config, f"run.dir={tmp_path / 'run'}", "distributed.ddp.comm_hook=bf16")
    assert forked.wait(ranks) == dict.fromkeys(ranks, 64)
    assert "distributed.ddp.comm_hook: expected none or fp16 over gloo" in (tmp_path / "log").read_text()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("distributed.timeout_s=11923200", "timeout_s: must be at most 86400"),
        ("distributed.heartbeat_timeout_s=12000000", "heartbeat_timeout_s: must be at most 86400"),
        (
            "distributed.nccl={TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 12000000}",
            "nccl.TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: must be at most 86400",
        ),
        ("distributed.nccl={NCCL_BLOCKING_WAIT: 1}", "NCCL_BLOCKING_WAIT has no effect; use distributed.blocking_wait"),
        ("distributed.nccl={NCCL_TIMEOUT: 1800}", "NCCL_TIMEOUT has no effect; use distributed.timeout_s"),
        ("distributed.nccl={PATH: x}", "expected names such as NCCL_SOCKET_IFNAME, found 'PATH'"),
        ("distributed.ddp.comm_hook=zip", "distributed.ddp.comm_hook"),
    ],
)
def test_refused_settings(setting: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, [setting])


@pytest.mark.setting("distributed.allow_long_timeout")
@pytest.mark.quick
def test_allow_long_timeout() -> None:
    long = ["distributed.timeout_s=11923200", "distributed.heartbeat_timeout_s=12000000"]
    config = load_config(None, [*long, "distributed.allow_long_timeout=true"])
    assert (config.distributed.timeout_s, config.distributed.heartbeat_timeout_s) == (11923200, 12000000)
    assert settings_to_export(config.distributed)["NCCL_NSOCKS_PERTHREAD"] == "4"


@pytest.mark.quick
def test_exported_names_and_values_are_those_of_torchs_headers() -> None:
    nccl, recorder = ((HEADERS / name).read_text() for name in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp"))
    exported = settings_to_export(DEFAULTS)
    assert [name for name in exported if f'"{name}"' not in nccl + recorder] == []
    modes = dict(re.findall(r"(\w+) = (\d)", nccl.partition("enum ErrorHandlingMode")[2].partition("}")[0]))
    assert exported["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == modes["SkipCleanUp"], "torch's default"
    off = settings_to_export(replace(DEFAULTS, async_error_handling=False))
    assert off["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == modes["NoHandling"]


@pytest.mark.quick
def test_variables_of_older_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """138 days are refused wherever they come from, and what has no effect says what to use."""
    config = load_config(None, []).distributed
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "11923200")
    with pytest.raises(ConfigError, match=r"environment: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: must be at most 86400 .*"):
        export_settings(config)
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "7200")
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    lines = kept_variables(config)
    assert [line.partition(":")[0] for line in lines] == [
        "NCCL_TIMEOUT",
        "NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    ]
    assert "distributed.timeout_s" in lines[0] and "distributed.blocking_wait" in lines[1] and "7200" in lines[2]
