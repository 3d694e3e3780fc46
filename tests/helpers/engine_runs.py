"""Start real runs through the real launchers and compare their curves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.tensors import TensorFiles
from tests.helpers.metrics import read_metrics
from tests.helpers.paths import BIN, ROOT
from tests.helpers.ports import free_port
from tests.helpers.waiting import TEST_TIMEOUT_S, wait_until

# Variables of the second of two processes, as a launcher sets them.
LAUNCHED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")

# Accumulation on two processes, unequal lengths, mixed modes that change, matrices large enough for ZeRO-3 to
# partition. bf16 and fp32 runs part by rounding alone, which Adam amplifies: the rate is that of a real run.
PARITY = """
run: {{dir: {run}, seed: 3}}
data: {{path: {store}, num_workers: 0}}
model: {{depth: 2, width: 64, num_heads: 2, conditioning_width: 32, modulation_rank: 8}}
mode: {{l2t: 0.4, t2l: 0.3, joint: 0.3}}
mode_schedule: {{12: {{l2t: 0.7, joint: 0.3}}}}
# AdamW turns the rounding of a nearly zero gradient into a step of any size; under these masks none is that small.
text: {{masks: independent}}
loss: {{latent_weight: 0.1}}  # so small a model's first gradients of 10 overflow in fp16
optim: {{lr: 1e-3, clip_norm: 2.0}}
train: {{steps: 20, global_batch_size: 8, micro_batch_size: 2}}
distributed: {{timeout_s: 120}}
log: {{every: 1, tensorboard: false}}
validation: {{every: 10, first: 0, samples: 70, text_samples: 1}}
checkpoint: {{every_steps: 10, keep_best: 0}}
sampling: {{steps: 3}}
"""
Single = Callable[..., Path]
CURVE = ("loss/total", "optim/grad_norm", "optim/lr")


def some(*engines: str) -> list[Any]:
    """All engines as parameters of a test, those that are not named by --slow only."""
    return [pytest.param(engine, marks=[] if engine in engines else pytest.mark.slow) for engine in ENGINES]


def environment(**changes: str) -> dict[str, str]:
    # Without what a run in this very process has exported before.
    inherited = {name: value for name, value in os.environ.items() if "NCCL" not in name and "TORCH_FR" not in name}
    if "PYTHONPATH" in changes:
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [changes["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    return {**inherited, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **changes}


def accelerate(engine: str, processes: int, *arguments: object) -> list[str]:
    """`accelerate launch` with the shipped config file of `engine`."""
    options = ["--num_processes", processes, "--main_process_port", free_port()]
    file = f"accelerate_configs/{engine}.yaml"
    return [str(BIN / "accelerate"), "launch", "--config_file", file, *map(str, options), "-m", "mmldlm.train"] + [
        str(argument) for argument in arguments
    ]


def torchrun(processes: int, *arguments: object) -> list[str]:
    options = ["--nproc_per_node", str(processes), "--master_port", str(free_port())]
    return [str(BIN / "torchrun"), *options, "-m", "mmldlm.train", *map(str, arguments)]


def deepspeed(processes: int, *arguments: object) -> list[str]:
    options = ["--num_gpus", str(processes), "--master_port", str(free_port())]
    return [str(BIN / "deepspeed"), *options, "mmldlm/train.py", *map(str, arguments)]


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run to its end; the launcher and all it started are killed where that takes too long."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(env or environment()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TEST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def succeed(command: Sequence[str]) -> str:
    done = run(command)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def record_list(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the records of one kind, in the order of the file."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def records(folder: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Return the records of one kind by step."""
    return {record["step"]: record for record in record_list(folder, kind)}


def difference(folder: Path, reference: Path, keys: Sequence[str] = CURVE, kind: str = "train") -> float:
    """Largest relative difference of two runs over all records and `keys`; the steps must be the same."""
    ours, theirs = records(folder, kind), records(reference, kind)
    assert ours.keys() == theirs.keys() and ours, (sorted(ours), sorted(theirs))
    return max(abs(ours[step][key] / theirs[step][key] - 1) for step in ours for key in keys)


def exit_record(folder: Path, name: str = "exit.json") -> dict[str, object]:
    return json.loads((folder / name).read_text())


def wait_for_step(folder: Path, step: int, log: Path, ended: Callable[[], object]) -> None:
    """Wait until `step` is in the curve; AssertionError with the log if the run has `ended` before."""

    def there() -> bool:
        return (folder / "metrics.jsonl").exists() and max(records(folder), default=0) >= step

    wait_until(lambda: there() or bool(ended()), f"step {step}")
    assert there(), log.read_text()[-3000:]


def saved_tensors(folder: Path, name: str = "model", step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a group of a run's checkpoint; the newest by default."""
    path = max((folder / "checkpoints").glob("step-*" if step is None else f"step-{step:08}"))
    return {key: tensor.clone() for key, tensor in TensorFiles.open(verify_checkpoint(path), name).items()}


def assert_same_tensors(folder: Path, reference: Path, *groups: str, tolerance: float = 0.0) -> None:
    """The newest checkpoints have the same tensors, bit for bit or within an absolute `tolerance`."""
    for group in groups:
        ours, theirs = saved_tensors(folder, group), saved_tensors(reference, group)
        assert ours.keys() == theirs.keys(), group
        if not tolerance:
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), group
            continue
        worst = max(float((ours[name] - theirs[name]).abs().max()) for name in ours if ours[name].numel())
        assert worst < tolerance, f"{group}: {worst}"


def assert_same_run(folder: Path, reference: Path, tolerance: float) -> None:
    assert difference(folder, reference) < tolerance
    assert difference(folder, reference, ("validation/total",), "validation") < tolerance
