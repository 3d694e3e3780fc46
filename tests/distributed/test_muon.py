"""Optimizers under the engines: Muon whole and sharded, DeepSpeed's AdamW, and refused combinations."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmldlm import train
from mmldlm.distributed.optimizers import newton_schulz
from tests.helpers.engine_runs import CURVE, difference, environment, records, run, saved_tensors
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import BIN, ROOT, SCRIPTS
from tests.helpers.ports import free_port

# Newton-Schulz runs in bfloat16: a gradient that is another by 1e-8 may round to another number, so the curves part
# sooner than those of AdamW (1e-5), by 4e-6 in the loss and 4e-4 in the norm after 20 steps.
MUON_LOSS, MUON_NORM = 1e-4, 5e-3
MUON = "optim.name=muon"


def report(folder: Path) -> str:
    return json.loads((folder / "startup.json").read_text())["optimizer"]


def assert_same_run(folder: Path, reference: Path) -> None:
    assert difference(folder, reference, ("loss/total",)) < MUON_LOSS
    assert difference(folder, reference, ("optim/grad_norm", "optim/lr")) < MUON_NORM
    assert difference(folder, reference, ("validation/total",), "validation") < MUON_LOSS


@pytest.mark.slow  # a run under FSDP2 follows one process, below
def test_sharded_muon_equals_whole_muon_bitwise() -> None:
    command = [str(BIN / "torchrun"), "--nproc_per_node", "3", "--master_port", str(free_port())]
    done = run([*command, str(SCRIPTS / "sharded_muon.py")], env=environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_muon_on_two_processes_follows_one(
    engine: str, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    prediction = "latent.prediction=epsilon"  # which the bounds were measured with
    forked.succeed(engine, tmp_path / engine, 2, parity_config, MUON, prediction)
    assert_same_run(tmp_path / engine, single(MUON, prediction))
    assert difference(single(MUON, prediction), single(prediction), ("loss/total",)) > 20 * MUON_LOSS
    assert report(tmp_path / engine) == report(single(MUON, prediction))
    assert report(single(MUON, prediction)).startswith("torch.Muon for 24 matrices of")
    for name in ("model", "optimizer"):
        ours, theirs = saved_tensors(tmp_path / engine, name), saved_tensors(single(MUON, prediction), name)
        assert ours.keys() == theirs.keys() and all(ours[key].shape == theirs[key].shape for key in ours)
        # Of weights that have moved by 1e-2.
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours if ours[key].numel()) < 5e-3
    kept = {
        name.rpartition("/")[2] for name in saved_tensors(single(MUON, prediction), "optimizer") if "qkv.weight" in name
    }
    assert kept == {"momentum_buffer"}


@pytest.mark.slow
def test_muon_run_resumes_under_other_engines(
    parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    """DDP x 2 to FSDP2 x 3 to one process, and not to AdamW."""
    settings = [MUON, "train.global_batch_size=12", "checkpoint.every_steps=5", "checkpoint.keep_last=9"]
    whole = single(*settings)
    at = [whole / "checkpoints" / "step-00000005"]
    for step, engine, processes in ((10, "ddp", 2), (15, "fsdp2", 3), (20, "single", 1)):
        folder = tmp_path / engine
        forked.succeed(engine, folder, processes, parity_config, *settings, f"resume={at[-1]}")
        ours, theirs = records(folder), records(whole)
        assert list(ours) == list(range(step - 4, 21))
        assert max(abs(ours[s]["loss/total"] / theirs[s]["loss/total"] - 1) for s in ours) < MUON_LOSS
        at.append(folder / "checkpoints" / f"step-{step:08}")


def test_other_optimizer_cannot_resume(
    parity_config: Path, single: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for before, now in (((MUON,), "adamw"), ((), "muon")):
        saved = single(*before) / "checkpoints" / "step-00000010"
        settings = [str(parity_config), f"run.dir={tmp_path / now}", f"resume={saved}", f"optim.name={now}"]
        assert train.main(settings) == 64
        assert f"mmldlm: error: optim.name: found {now}" in capsys.readouterr().err
        assert not (tmp_path / now / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("engine", "name", "must_name"),
    [
        ("zero2", "muon", ("optim.name", "muon", "zero2")),
        ("fsdp2", "deepspeed_adam", ("optim.name", "deepspeed_adam", "fsdp2")),
        ("zero3", "deepspeed_adam", ("optim.name", "deepspeed_adam", "cpu", "zero3_offload")),
    ],
)
def test_a_run_is_refused_before_anything_is_created(
    engine: str, name: str, must_name: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    if name == "deepspeed_adam" and torch.cuda.is_available():
        pytest.skip("CUDA has the FusedAdam that is refused here")
    log = tmp_path / "log"
    given = [parity_config, f"run.dir={tmp_path / 'run'}", f"optim.name={name}"]
    pids = forked.start(engine, given, 2, log)
    assert forked.wait(pids) == dict.fromkeys(pids, 64), log.read_text()[-3000:]
    refusals = [line for line in log.read_text().splitlines() if line.startswith("mmldlm: error: optim.name")]
    assert len(refusals) == 2 and all(text in refusals[0] for text in must_name)
    assert not (tmp_path / "run").exists()


BUILD = """
import torch
from mmldlm.errors import run_command
from mmldlm.distributed.deepspeed_adam import build_deepspeed_adam
groups = [{"params": [torch.nn.Parameter(torch.ones(8))]}]
raise SystemExit(run_command(lambda: build_deepspeed_adam(groups, True, lr=0.1) and 0))
"""


def build(**variables: str) -> subprocess.CompletedProcess[str]:
    env = environment(PYTHONPATH=str(ROOT), DS_ACCELERATOR="cpu", **variables)
    return subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=600)


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    done = build(CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 64, done.stderr[-2000:]
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "mmldlm: error: optim.name: deepspeed_adam is DeepSpeed's CPUAdam, whose kernel could not be"
    )
    assert "no no-such-compiler on the PATH; adamw needs none" in last


@pytest.fixture(scope="module")
def cpu_adam() -> None:
    """Built before the runs, about a minute the first time; DeepSpeed keeps it in its own cache."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler to build DeepSpeed's CPUAdam")
    done = build()
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("engine", [pytest.param("zero2_offload", marks=pytest.mark.slow), "zero3_offload"])
def test_deepspeeds_adam_is_adamw(
    engine: str, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    """It resumes from its own checkpoint and from AdamW's of another engine, and AdamW resumes from its checkpoint."""
    name = "optim.name=deepspeed_adam"
    whole = tmp_path / "whole"
    forked.succeed(engine, whole, 2, parity_config, name)
    assert report(whole) == "deepspeed.DeepSpeedCPUAdam"
    assert difference(whole, single()) < 1e-5
    assert difference(whole, single()) > 0, "another implementation rounds otherwise"
    for group in ("model", "optimizer"):
        ours, theirs = saved_tensors(whole, group), saved_tensors(single(), group)
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours if ours[key].numel()) < 1e-5
    for source, target, settings in ((whole, engine, [name]), (single(), engine, [name]), (whole, "ddp", [])):
        folder = tmp_path / f"{source.name}-{target}"
        saved = source / "checkpoints" / "step-00000010"
        forked.succeed(target, folder, 2, parity_config, *settings, f"resume={saved}")
        ours, theirs = records(folder), records(single())
        assert list(ours) == list(range(11, 21))
        assert max(abs(ours[s][key] / theirs[s][key] - 1) for s in ours for key in CURVE) < 1e-5
        if source is whole and settings:
            for group in ("model", "optimizer"):
                expected, result = saved_tensors(whole, group), saved_tensors(folder, group)
                assert all(torch.equal(result[entry], expected[entry]) for entry in expected), "not the same bits"
        steps = {float(tensor) for key, tensor in saved_tensors(folder, "optimizer").items() if key.endswith("/step")}
        assert steps == {20.0}


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(3, 40, 40), (2, 24, 96), (9, 96, 24), (1, 30, 40)])
def test_matrices_of_a_cpu_are_orthogonalized_as_by_the_definition(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b, c = coefficients = 3.4445, -4.775, 2.0315
    expected = []
    for matrix in matrices:
        x = matrix / matrix.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        expected.append(x)
    found = newton_schulz(matrices.float(), coefficients, 5, 1e-7)
    torch.testing.assert_close(found, torch.stack(expected).float(), rtol=0, atol=1e-4)
