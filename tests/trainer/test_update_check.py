"""The update check: each planted fault of a rank is named under every engine; nothing else is changed or blamed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm.trainer.update_check import (
    GRADIENT_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    PERIOD,
    Gradients,
    compare_gradients,
    fingerprint,
)
from tests.helpers.engine_runs import Single, records, saved_tensors
from tests.helpers.faulty_steps import skipped_steps
from tests.helpers.forked_runs import ForkedRuns

SHORT = ("train.steps=5", "validation.every=0", "checkpoint.every_steps=1")
ALWAYS, NEVER = "guard.verify_updates_every=1", "guard.verify_updates_every=0"
# What a fault makes wrong, and on which rank, if that can be told.
FAULTS = {
    "reduction": r"the gradient of (\S+) is another one",
    "noise": r"the gradient of (\S+) is another one",
    "accumulation": r"the gradient of (\S+) is another one",
    "lr": r"the update of (\S+) is not that of adamw at learning rate 0\.000\d+, on rank 1",
    "stale": r"the update of (\S+) is not that of adamw at learning rate 0\.000\d+, on rank 1",
}
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
DEFAULT = {("ddp", "reduction"), ("ddp", "accumulation"), ("fsdp2", "lr"), ("zero3", "noise"), ("zero2", "stale")}
# In low precision the tolerance is larger, and has to bite as well.
LOW_PRECISION = [("ddp", "fp16"), ("fsdp2", "fp16"), *((engine, "bf16") for engine in ENGINES)]
DEFAULT_LOW = {("ddp", "fp16", "accumulation"), ("fsdp2", "bf16", "noise"), ("zero3", "bf16", "lr")}


def error_of(
    forked: ForkedRuns, engine: str, fault: str, folder: Path, *settings: object, first_step: int = 2
) -> tuple[dict[int, int], str]:
    """Return exit codes and the error line of a run whose rank 1 has a fault from step `first_step`, counted from 0."""
    log = folder.with_suffix(".log")
    variables = {"FAULT": fault, "FAULT_STEP": str(first_step)}
    pids = forked.start(engine, [*settings, f"run.dir={folder}"], 2, log, "faulty_update.py", **variables)
    codes = forked.wait(pids)
    lines = {line for line in log.read_text().splitlines() if "error:" in line}
    assert len(lines) == 1, log.read_text()[-3000:]  # the same on both ranks
    return codes, lines.pop()


def updates(folder: Path) -> dict[int, list[float]]:
    """Return the recorded fingerprints by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["fingerprint"] for line in lines if line["kind"] == "update"}


@pytest.mark.parametrize(
    ("engine", "precision", "fault"),
    [
        *(
            pytest.param(engine, "fp32", fault, marks=[] if (engine, fault) in DEFAULT else pytest.mark.slow)
            for engine in ENGINES
            for fault in FAULTS
        ),
        *(
            pytest.param(*case, fault, marks=[] if (*case, fault) in DEFAULT_LOW else pytest.mark.slow)
            for case in LOW_PRECISION
            for fault in FAULTS
        ),
    ],
)
def test_fault_is_named_by_its_first_step_and_a_tensor(
    engine: str, precision: str, fault: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = (*SHORT, ALWAYS, f"precision={precision}")
    codes, error = error_of(forked, engine, fault, folder, parity_config, *settings)
    assert set(codes.values()) == {70}
    match = re.search(rf"step 3: {FAULTS[fault]}", error)
    assert match and match[1] in saved_tensors(folder), error
    assert json.loads((folder / "exit.json").read_text())["code"] == 70
    # The update that went wrong is in no checkpoint, and the one before it is.
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "step-00000002"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "text"),
    [("noise", FAULTS["noise"]), ("lr", FAULTS["lr"].replace("adamw", "muon"))],
)
def test_faults_beside_muon_under_fsdp2(
    fault: str, text: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """A learning rate of its own is found in a tensor of AdamW; what Muon makes of a matrix is not computed again."""
    codes, error = error_of(forked, "fsdp2", fault, tmp_path / "run", parity_config, *SHORT, ALWAYS, "optim.name=muon")
    assert set(codes.values()) == {70} and re.search(f"step 3: {text}", error), error


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("ddp", "the replicas of the weights differ, most in token_embedding.weight"),
        pytest.param(
            "zero2", "the replicas of the weights differ, most in token_embedding.weight", marks=pytest.mark.slow
        ),
        pytest.param(
            "zero3",
            "the network computes with another token_embedding.weight than the optimizer has updated, on rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_changed_copy_of_a_weight(
    engine: str, text: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    _, error = error_of(forked, engine, "copy", tmp_path / "run", parity_config, *SHORT, ALWAYS)
    assert f"step 3: {text}" in error


def test_rank_with_its_own_schedule(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """A learning rate that is wrong on a rank before its optimizer gets it."""
    settings = (parity_config, *SHORT, ALWAYS, "schedule.lr=plateau", "validation.every=5", "optim.warmup_steps=0")
    _, error = error_of(forked, "fsdp2", "cuts", tmp_path / "run", *settings)
    assert "step 3: the learning rate is 0.0005 on rank 1 and 0.001 on rank 0" in error


@pytest.mark.setting("guard.verify_updates_every")
def test_steps_that_are_verified(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """The first step of each start and every N-th one; a fault between two of them is found by the next."""
    folder, settings = tmp_path / "run", (parity_config, "validation.every=0", "guard.verify_updates_every=4")
    forked.succeed("ddp", folder, 2, *settings, "train.steps=9", "checkpoint.every_steps=6")
    assert list(updates(folder)) == [1, 4, 8]
    _, error = error_of(forked, "ddp", "noise", folder, *settings, "train.steps=20", first_step=12)
    assert list(updates(folder)) == [1, 4, 8, 10, 12] and "step 16: the gradient of" in error
    forked.succeed("ddp", tmp_path / "never", 2, parity_config, *SHORT, NEVER)
    assert not updates(tmp_path / "never")


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("ddp", ("optim.name=muon", "ema.decay=0.9")),
        ("fsdp2", ("precision=fp16", "model.dropout=0.1")),
        ("zero3", ("precision=bf16", "freeze=[latent_stream]")),
        *(
            pytest.param(engine, settings, marks=pytest.mark.slow)
            for engine, settings in [
                ("single", ("optim.name=muon",)),
                ("ddp", ("precision=fp16",)),
                ("ddp", ("precision=bf16", "distributed.ddp.comm_hook=fp16")),
                ("ddp", ("distributed.ddp.comm_hook=powersgd",)),
                ("ddp", ("train.auto_micro_batch=true", "train.batch_schedule={2: {global_batch_size: 12}}")),
                ("fsdp2", ("optim.name=muon", "ema.decay=0.9")),
                ("fsdp2", ("precision=bf16", "memory.activation_checkpointing=full")),
                ("zero1", ("precision=bf16", "ema.decay=0.9")),
                ("zero2", ("model.dropout=0.1", "train.batch_schedule={2: {global_batch_size: 12}}")),
                ("zero2", ("precision=bf16",)),
                ("zero2_offload", ("optim.name=deepspeed_adam",)),
                ("zero3_offload", ("precision=bf16", "optim.name=deepspeed_adam")),
            ]
        ),
    ],
)
def test_check_changes_and_blames_nothing(
    engine: str, settings: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The curve is bit by bit that of a run without checks, where an update is verified in every step."""
    curves: list[Any] = []
    for every in (ALWAYS, NEVER):
        folder, count = tmp_path / every[-1], 1 if engine == "single" else 2
        forked.succeed(engine, folder, count, parity_config, *SHORT, *settings, every)
        curves.append([(line["loss/total"], line["optim/grad_norm"]) for line in records(folder).values()])
    assert curves[0] == curves[1]
    assert list(updates(tmp_path / "1")) == [1, 2, 3, 4, 5]


def test_skipped_step_is_not_judged(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Non-finite gradients of a rank are a matter of the guard; the next step is verified in place of that one."""
    faults = [{"step": 0, "kind": "nan", "rank": 1, "micro_batch": 0}]
    folder = tmp_path / "run"
    variables = {"FAULTS": json.dumps(faults), "FACTS": str(tmp_path)}
    settings = (*SHORT, "guard.verify_updates_every=3")
    forked.succeed("fsdp2", folder, 2, parity_config, *settings, script="faulty_steps.py", **variables)
    assert list(skipped_steps(folder)) == [1]
    assert list(updates(folder)) == [2, 3]


def test_fingerprint_is_engine_neutral(parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path) -> None:
    settings = (*SHORT, "checkpoint.every_steps=0", "guard.verify_updates_every=3")
    expected = updates(single(*settings))
    assert list(expected) == [1, 3]
    for engine in ENGINES:
        forked.succeed(engine, tmp_path / engine, 2, parity_config, *settings)
        for step, values in updates(tmp_path / engine).items():
            assert values == pytest.approx(expected[step], rel=0, abs=1e-4 * math.hypot(*expected[step])), engine


@pytest.mark.quick
@pytest.mark.parametrize("tolerance", [GRADIENT_TOLERANCE, LOW_PRECISION_TOLERANCE])
def test_a_gradient_that_cancels_is_judged_by_all_gradients(tolerance: float) -> None:
    """Its own norm may be less than the rounding errors of what it is the sum of."""

    def gradients(difference: float) -> Gradients:
        values = torch.tensor([[1.0, -1.0], [difference, 0.0]], dtype=torch.float64)
        return Gradients(["large.weight", "tiny.bias"], values, torch.tensor([1.0, 1e-6], dtype=torch.float64))

    assert compare_gradients(gradients(tolerance / 30), gradients(0.0), tolerance) is None
    fault = compare_gradients(gradients(tolerance), gradients(0.0), tolerance)
    assert fault is not None and fault.tensor == "tiny.bias"


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
