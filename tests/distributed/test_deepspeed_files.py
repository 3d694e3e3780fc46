"""DeepSpeed launcher files that users bring along: each trains the curve of one process, or names the edit it needs.

`deepspeed_files/` has the settings of files as of July 2026:

- `accelerate_config_*`: what `accelerate config` writes for DeepSpeed with default answers;
- `accelerate_*`: huggingface/accelerate, examples/config_yaml_templates and deepspeed_config_templates;
- `trl_*`, `dllm_*`: accelerate_configs of huggingface/trl and ZHZisZZ/dllm;
- `hf_*`: huggingface/transformers, tests/deepspeed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

from mmldlm.distributed.deepspeed_file import StepPlan
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.errors import ConfigError
from tests.helpers.engine_runs import (
    LAUNCHED,
    Single,
    accelerate,
    deepspeed,
    difference,
    saved_tensors,
    succeed,
)
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT

FOLDER = Path("tests/distributed/deepspeed_files")
RUN = {  # file -> its engine
    "accelerate_config_zero1.yaml": "zero1",
    "accelerate_config_zero2.yaml": "zero2",
    "accelerate_config_zero3.yaml": "zero3",
    "dllm_zero1.yaml": "zero1",
    "dllm_zero2.yaml": "zero2",
    "dllm_zero3.yaml": "zero3",
    "hf_zero2.json": "zero2_offload",
    "hf_zero3.json": "zero3_offload",
    "trl_zero1.yaml": "zero1",
    "trl_zero2.yaml": "zero2",
    "trl_zero3.yaml": "zero3",
}
# A file of DeepSpeed's own and one of Accelerate's. The others are launched by --slow, and mean the same under both
# launchers (test_accelerate_launch_and_accelerate_config_are_one_launch).
EACH = ("hf_zero3.json", "trl_zero3.yaml")
# They enable fp16, which ZeRO does not run here.
NEED_AN_EDIT = [
    "accelerate_deepspeed.yaml",
    "accelerate_stage1.json",
    "accelerate_stage2.json",
    "accelerate_stage2_offload.json",
    "accelerate_stage3.json",
    "accelerate_stage3_offload.json",
]
# These files have no accumulation, or one micro-batch per step.
SETTINGS = ("train.steps=4", "train.micro_batch_size=4", "validation.every=0", "checkpoint.every_steps=0")
PLAN = StepPlan(micro_batch_size=4, accumulation=1, global_batch_size=8, clip_norm=2.0, precision="fp32", width=64)


def option(path: Path) -> list[str]:
    return ["--accelerate_config" if path.suffix == ".yaml" else "--deepspeed_config", str(path)]


def launch_of(path: Path, **environment: str) -> LauncherEnv:
    files = {"accelerate_file": str(path)} if path.suffix == ".yaml" else {"deepspeed_file": str(path)}
    return read_launcher_env({**LAUNCHED, **environment}, **files)


def resolve(launch: LauncherEnv, plan: StepPlan = PLAN) -> dict[str, Any]:
    assert launch.deepspeed is not None
    return launch.deepspeed.resolve(plan)


@pytest.mark.quick
def test_every_file_is_in_the_matrix() -> None:
    files = {path.name for path in (ROOT / FOLDER).iterdir() if "zero" in path.name or "stage" in path.name}
    assert files <= {*RUN, *NEED_AN_EDIT}


@pytest.mark.parametrize("name", [name if name in EACH else pytest.param(name, marks=pytest.mark.slow) for name in RUN])
def test_file_gives_the_curve_of_one_process(
    name: str, parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    bf16 = name.startswith("trl")  # they ask for bf16
    settings, folder = (*SETTINGS, *(["precision=bf16"] if bf16 else [])), tmp_path / "run"
    forked.succeed("ddp", folder, 2, parity_config, *settings, *option(FOLDER / name))
    report = json.loads((folder / "startup.json").read_text())
    assert report["engine"] == RUN[name] and report["world_size"] == 2
    assert difference(folder, single(*settings)) < (2e-2 if bf16 else 1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("name", NEED_AN_EDIT)
def test_refused_file_runs_after_the_edit_that_the_message_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        resolve(launch_of(FOLDER / name))
    message = str(caught.value)
    assert "\n" not in message and message.count(";") == 1, message  # one problem
    assert 'fp16.enabled is true, but false by the run config (precision); remove it or write "auto"' in message
    file, _, _ = message.partition(": ")
    edited = json.loads(Path(file).read_text())
    edited["fp16"]["enabled"] = "auto"
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    assert resolve(launch_of(tmp_path / "edited.json"))["fp16"] == {"enabled": False}


@pytest.mark.slow  # accelerate's launcher itself: test_files_under_accelerate_launch
def test_accelerate_launch(parity_config: Path, single: Single, tmp_path: Path) -> None:
    command = accelerate("zero2", 2, parity_config, f"run.dir={tmp_path}", *SETTINGS)
    command[command.index("accelerate_configs/zero2.yaml")] = str(FOLDER / "accelerate_config_zero2.yaml")
    assert "engine       zero2, 2 processes" in succeed(command)
    assert difference(tmp_path, single(*SETTINGS)) < 1e-5


@pytest.mark.slow
def test_deepspeed_launcher(parity_config: Path, single: Single, tmp_path: Path) -> None:
    file = ("--deepspeed_config", FOLDER / "hf_zero3.json")
    output = succeed(deepspeed(2, parity_config, f"run.dir={tmp_path}", *SETTINGS, *file))
    assert "engine       zero3_offload, 2 processes" in output and "no effect here: optimizer" in output
    assert difference(tmp_path, single(*SETTINGS)) < 1e-5


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in RUN if name.endswith("yaml")])
def test_accelerate_launch_and_accelerate_config_are_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--config_file", str(FOLDER / name), "--num_processes", "2", "--main_process_port", "0", "train.py"]
    args, file, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    args.deepspeed_fields_from_accelerate_config = ",".join([*file.deepspeed_config, "mixed_precision"])
    _, variables = prepare_deepspeed_cmd_env(args)
    given = {key: value for key, value in variables.items() if key.startswith("ACCELERATE_")}
    ours, theirs = launch_of(FOLDER / name), read_launcher_env({**LAUNCHED, **given})
    assert dataclasses.replace(ours, launcher="") == dataclasses.replace(theirs, launcher="")
    assert ours.engine == RUN[name] and resolve(ours) == resolve(theirs)


def test_bf16_gradients_accumulate_in_float32(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Of 8 micro-batches of one sample: a sum in bf16 would lose the low bits of each."""
    settings = ("precision=bf16", "train.steps=1", "train.global_batch_size=16", "train.micro_batch_size=1")
    gradients = {}
    for engine in ("fsdp2", "zero1", "zero2", "zero3"):
        forked.succeed(engine, tmp_path / engine, 2, parity_config, *settings, "validation.every=0")
        # After the first step the first moment is a multiple of the gradient.
        tensors = saved_tensors(tmp_path / engine, "optimizer")
        moments = [tensors[key].flatten() for key in sorted(tensors) if key.endswith("/exp_avg")]
        gradients[engine] = torch.cat(moments)
    reference = gradients.pop("fsdp2")
    errors = {engine: float((g - reference).norm() / reference.norm()) for engine, g in gradients.items()}
    assert max(errors.values()) < 1e-4, errors


def test_zero1_frees_its_buffers_before_the_step_in_bf16(
    parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Between backward and step there are weights in bf16, and half of masters, moments and float32 gradients."""
    settings, out = ["precision=bf16", "train.steps=3", "validation.every=0"], tmp_path / "facts.json"
    settings += ["guard.verify_updates_every=0"]  # a check holds more
    forked.succeed("zero1", tmp_path / "run", 2, parity_config, *settings, script="engine_probe.py", PROBE=str(out))
    assert json.loads(out.read_text())["held"] == pytest.approx(2 + 16 / 2, rel=0.05)


Refused = Callable[..., str]


@pytest.fixture
def refused(parity_config: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns, tmp_path: Path) -> Refused:
    """Start two processes with these DeepSpeed settings beside those of ZeRO-3: the line that they end with."""

    def line(zero: object = None, settings: tuple[str, ...] = (), **sections: object) -> str:
        path, log = tmp_path / "ds.json", tmp_path / "log"
        content = {"zero_optimization": {"stage": 3, **(zero or {})} if isinstance(zero, (dict, type(None))) else zero}
        path.write_text(json.dumps({**content, **sections}))
        given = (parity_config, *SETTINGS, *settings, f"run.dir={tmp_path / 'run'}", "--deepspeed_config", path)
        ranks = two_ranks("ddp", *given)
        codes, text = forked.wait(ranks), log.read_text()
        assert codes == dict.fromkeys(ranks, 64), f"{codes}\n{text[-3000:]}"
        assert "Traceback" not in text, text[-3000:]
        lines = [line for line in text.splitlines() if line.startswith("mmldlm: error: ")]
        assert len(lines) == 2 and str(path) in lines[0], text[-3000:]
        return lines[0]

    return line


@pytest.mark.parametrize(
    ("zero", "sections", "must_name"),
    [
        # Refused when DeepSpeed wraps the model.
        ({}, {"communication_data_type": "fp8"}, ("Invalid communication_data_type", "ValueError in deepspeed")),
        ({"allgather_bucket_size": 3, "stage": 2}, {}, ("allgather_bucket_size must be a multiple",)),
    ],
)
def test_errors_of_deepspeed_are_one_line(
    zero: dict[str, object], sections: dict[str, object], must_name: tuple[str, ...], refused: Refused
) -> None:
    line = refused(zero, **sections)
    assert all(text in line for text in must_name), line
