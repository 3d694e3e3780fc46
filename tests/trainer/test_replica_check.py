"""The replica check: ranks that train different models are named; nothing else is changed or blamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.trainer.replica_check import PERIOD, fingerprint
from tests.helpers.engine_runs import records
from tests.helpers.faulty_steps import skipped_steps
from tests.helpers.forked_runs import ForkedRuns

SHORT = ("train.steps=5", "validation.every=0", "checkpoint.every_steps=1")
ALWAYS, NEVER = "guard.verify_updates_every=1", "guard.verify_updates_every=0"
DIFFER = "the replicas of the weights differ, most in token_embedding.weight"
STALE = "the network computes with another token_embedding.weight than the optimizer has updated"


def error_of(
    forked: ForkedRuns, engine: str, fault: str, folder: Path, *settings: object, first_step: int = 2
) -> tuple[dict[int, int], str]:
    """Return exit codes and the error line of a run whose rank 1 has a fault from step `first_step`, counted from 0."""
    log = folder.with_suffix(f".{first_step}.log")
    variables = {"FAULT": fault, "FAULT_STEP": str(first_step)}
    pids = forked.start(engine, [*settings, f"run.dir={folder}"], 2, log, "faulty_update.py", **variables)
    codes = forked.wait(pids)
    lines = {line for line in log.read_text().splitlines() if "error:" in line}
    assert len(lines) == 1, log.read_text()[-3000:]  # the same on both ranks
    return codes, lines.pop()


@pytest.mark.parametrize(
    ("engine", "fault", "text"),
    [
        ("ddp", "copy", DIFFER),
        pytest.param("ddp", "stale", "the replicas of the weights differ, most in ", marks=pytest.mark.slow),
        pytest.param("ddp", "lr", "the replicas of the weights differ, most in ", marks=pytest.mark.slow),
        pytest.param("zero2", "copy", DIFFER, marks=pytest.mark.slow),
        ("zero3", "copy", f"{STALE}, on rank 1"),
    ],
)
def test_ranks_with_weights_of_their_own(
    engine: str, fault: str, text: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    codes, error = error_of(forked, engine, fault, folder, parity_config, *SHORT, ALWAYS)
    assert set(codes.values()) == {70} and f"step 3: {text}" in error
    assert json.loads((folder / "exit.json").read_text())["code"] == 70
    # What went wrong is in no checkpoint, and the step before is.
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-00000002"


@pytest.mark.slow
def test_replicas_of_shards(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Rank 1 has a shard of the first of two replicas, each of two ranks."""
    log, arguments = tmp_path / "log", (parity_config, *SHORT, ALWAYS, "train.micro_batch_size=1")
    variables = {"FAULT": "copy", "FAULT_STEP": "2"}
    pids = forked.start(
        "fsdp2_hsdp", [*arguments, f"run.dir={tmp_path / 'run'}"], 4, log, "faulty_update.py", **variables
    )
    assert set(forked.wait(pids).values()) == {70} and f"step 3: {DIFFER}" in log.read_text()


def test_rank_with_its_own_schedule(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    settings = (parity_config, *SHORT, ALWAYS, "schedule.lr=plateau", "validation.every=5", "optim.warmup_steps=0")
    _, error = error_of(forked, "fsdp2", "cuts", tmp_path / "run", *settings)
    assert "step 3: the learning rate is 0.0005 on rank 1 and 0.001 on rank 0" in error


@pytest.mark.setting("guard.verify_updates_every")
def test_steps_that_are_checked(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """The first step of each start and every N-th one: a fault between two of them is found by the next."""
    folder, settings = tmp_path / "run", (parity_config, "validation.every=0", "guard.verify_updates_every=4")
    saves = (*settings, "train.steps=9", "checkpoint.every_steps=6")
    _, error = error_of(forked, "ddp", "copy", folder, *saves, first_step=5)
    assert f"step 8: {DIFFER}" in error
    _, error = error_of(forked, "ddp", "copy", folder, *saves, first_step=6)
    assert f"step 7: {DIFFER}" in error, "the run has resumed at step 6"
    variables = {"FAULT": "copy", "FAULT_STEP": "2"}
    never = (parity_config, *SHORT, NEVER)
    forked.succeed("ddp", tmp_path / "never", 2, *never, script="faulty_update.py", **variables)


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("ddp", ("optim.name=muon", "ema.decay=0.9")),
        ("zero2", ("precision=bf16",)),
        *(
            pytest.param(engine, settings, marks=pytest.mark.slow)
            for engine, settings in [
                ("single", ("optim.name=muon",)),
                ("ddp", ("precision=bf16", "distributed.ddp.comm_hook=fp16")),
                ("ddp", ("train.auto_micro_batch=true", "train.batch_schedule={2: {global_batch_size: 12}}")),
                ("fsdp2", ("precision=fp16", "model.dropout=0.1")),
                ("fsdp2", ("optim.name=muon", "ema.decay=0.9")),
                ("zero1", ("precision=bf16", "ema.decay=0.9")),
                ("zero3", ("precision=bf16", "freeze=[latent_stream]")),
                ("zero2_offload", ("optim.name=deepspeed_adam",)),
                ("zero3_offload", ("precision=bf16", "optim.name=deepspeed_adam")),
            ]
        ),
    ],
)
def test_check_changes_and_blames_nothing(
    engine: str, settings: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The curve is bit by bit that of a run without checks."""
    curves: list[Any] = []
    for every in (ALWAYS, NEVER):
        folder, count = tmp_path / every[-1], 1 if engine == "single" else 2
        forked.succeed(engine, folder, count, parity_config, *SHORT, *settings, every)
        curves.append([(line["loss/total"], line["optim/grad_norm"]) for line in records(folder).values()])
    assert curves[0] == curves[1] and len(curves[0]) == 5


def test_skipped_step_is_not_judged(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Non-finite gradients of a rank are a matter of the guard."""
    folder = tmp_path / "run"
    faults = [{"step": 0, "kind": "nan", "rank": 1, "micro_batch": 0}]
    variables = {"FAULTS": json.dumps(faults), "FACTS": str(tmp_path)}
    forked.succeed("fsdp2", folder, 2, parity_config, *SHORT, ALWAYS, script="faulty_steps.py", **variables)
    assert list(skipped_steps(folder)) == [1] and list(records(folder)) == [2, 3, 4, 5]


@pytest.mark.quick
def test_fingerprint_adds_up_over_parts() -> None:
    values = torch.randn(3 * PERIOD + 100, generator=torch.Generator().manual_seed(1))
    whole = fingerprint("a.weight", 0, values)
    for cut in (0, 1, 77, PERIOD, 2 * PERIOD + 5, len(values)):
        parts = fingerprint("a.weight", 0, values[:cut]) + fingerprint("a.weight", cut, values[cut:])
        assert torch.allclose(parts, whole, rtol=0, atol=1e-9)
    # Any element that changes, changes it, and another name or place of the same values does.
    assert (fingerprint("b.weight", 0, values) - whole).abs().min() > 1
    assert (fingerprint("a.weight", 0, values.roll(1)) - whole).abs().max() > 1
    changed = values.clone()
    changed[-1] += 0.5
    assert torch.allclose(
        (fingerprint("a.weight", 0, changed) - whole).abs(), torch.full((2,), 0.5).double(), atol=1e-6
    )
