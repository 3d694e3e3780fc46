"""Steps with numbers that are not finite, or with a spike, leave no trace in weights and moments of any rank."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mmldlm import train
from mmldlm.checkpoint.state import NORM_WINDOW, TrainState
from mmldlm.config import GuardConfig
from mmldlm.distributed.grad_scaler import MIN_SCALE
from mmldlm.errors import NumericalError
from mmldlm.trainer.step_guard import MIN_ACCEPTED_NORMS, SKIPS_FILE, Skip, StepGuard
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import CURVE, exit_record, records
from tests.helpers.faulty_steps import FAULTS, run_with_faults, skipped_steps
from tests.helpers.forked_runs import ForkedRuns

# Two micro-batches of one sample on each of two ranks. The first step of all is among those that go wrong in the
# second micro-batch, when the engine holds gradients of the first.
SETTINGS = ("train.global_batch_size=4", "train.micro_batch_size=1", "validation.every=0", "distributed.timeout_s=20")
REASONS = {1: "loss", 3: "loss", 4: "loss", 6: "norm", 8: "norm", 10: "loss", 12: "loss", 31: "spike"}


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("ddp", "fsdp2", "zero1", "zero2_offload", "zero3", "zero3_offload", "zero1-bf16", "zero2-bf16")
]


@pytest.mark.setting("guard.grad_norm_spike")
@pytest.mark.parametrize("engine", ["zero2", *SLOW])
def test_a_skipped_step_leaves_no_trace(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    engine, _, precision = engine.partition("-")
    settings = ("train.steps=33", "guard.grad_norm_spike=50", f"precision={precision or 'fp32'}")
    arguments = (parity_config, *SETTINGS, *settings)
    folder = tmp_path / "faulty"
    facts = run_with_faults(forked, engine, folder, FAULTS, *arguments)
    for rank in facts:
        changed = [after != before for before, after in zip(rank["digests"], rank["digests"][1:], strict=False)]
        assert [step for step, new in enumerate(changed, 1) if not new] == list(REASONS)
    result = records(folder)
    assert sorted(result) == [step for step in range(1, 34) if step not in REASONS]
    assert result[33]["health/skipped_steps"] == len(REASONS)
    assert all(abs(result[step][key]) < math.inf for step in result for key in CURVE)
    events = records(folder, "skip")
    assert {step: event["reason"] for step, event in events.items()} == REASONS
    check_record(skipped_steps(folder), facts, result)

    # All that follows is what it would be if the engine had never seen those steps.
    reference = run_with_faults(forked, engine, tmp_path / "reference", FAULTS, *arguments, REFERENCE="1")
    assert [rank["digests"] for rank in facts] == [rank["digests"] for rank in reference]


def check_record(lines: dict[int, dict[str, Any]], facts: list[Any], result: dict[int, dict[str, float]]) -> None:
    """The record names reason, norm and limit, and exactly the planted samples as those without a finite loss."""
    assert {step: line["reason"] for step, line in lines.items()} == REASONS
    planted = {int(step): sample for rank in facts for step, sample in rank["planted"].items()}
    for step, line in lines.items():
        parts = [part for rank in line["ranks"] for part in rank]
        assert len(line["ranks"]) == 2 and len({sample for part in parts for sample in part["samples"]}) == 4
        broken = [sample for part in parts if isinstance(part["loss"], str) for sample in part["samples"]]
        assert broken == ([planted[step]] if step in planted else [])
        assert (line["norm"] is None) == (line["reason"] == "loss")
    assert lines[6]["norm"] in ("inf", "nan") and lines[8]["limit"] is None
    norms = [record["optim/grad_norm"] for step, record in result.items() if step < 31]
    assert lines[31]["norm"] > lines[31]["limit"] == 50 * statistics.median(norms)


def test_too_many_in_a_row_end_the_run_on_all_ranks(
    parity_config: Path, two_ranks: Callable[..., list[int]], forked: ForkedRuns, tmp_path: Path
) -> None:
    kinds = ["nan", "bad_gradient", "inf"]
    faults = [{"step": step, "kind": kind, "rank": 1, "micro_batch": 0} for step, kind in enumerate(kinds, 2)]
    folder = tmp_path / "run"
    folder.mkdir()
    given = (parity_config, f"run.dir={folder}", *SETTINGS, "train.steps=9", "guard.max_consecutive=3")
    variables = {"FAULTS": json.dumps(faults), "FACTS": str(folder)}
    ranks = two_ranks("fsdp2", *given, script="faulty_steps.py", **variables)
    assert forked.wait(ranks) == dict.fromkeys(ranks, 70), (tmp_path / "log").read_text()[-4000:]
    assert exit_record(folder)["code"] == 70
    others = [exit_record(folder, path.name) for path in folder.glob("exit.rank*.json")]
    assert [other["code"] for other in others] == [70]
    for record in (exit_record(folder), *others):
        cause = str(record["cause"])
        assert "step 5" in cause and "loss is not finite" in cause and "row: 3" in cause
        assert str(folder / SKIPS_FILE) in cause
    assert list(skipped_steps(folder)) == [3, 4, 5]


def test_a_resumed_run_knows_the_same_spikes(tiny_config: Path, tmp_path: Path) -> None:
    class SpikeTrainer(Trainer):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * (1e4 if self.state.step == 33 else 1.0))

    folder = tmp_path / "run"
    settings = ["train.steps=40", "checkpoint.every_steps=30", "validation.every=0", "guard.grad_norm_spike=20"]
    assert train.main([str(tiny_config), *settings], trainer_cls=SpikeTrainer) == 0
    last = folder / "checkpoints" / "step-00000040"
    whole, spikes, end = records(folder), skipped_steps(folder), (last / "state.json").read_text()
    assert list(spikes) == [34] and spikes[34]["reason"] == "spike"
    assert json.loads(end)["accepted_norms"] == [record["optim/grad_norm"] for record in whole.values()]

    shutil.rmtree(last)
    assert train.main([str(tiny_config), *settings], trainer_cls=SpikeTrainer) == 0
    again = records(folder)
    assert list(again) == list(whole)
    assert all(again[step][key] == whole[step][key] for step in whole for key in CURVE)
    assert skipped_steps(folder) == {34: {**spikes[34], "time": skipped_steps(folder)[34]["time"]}}
    assert len((folder / SKIPS_FILE).read_text().splitlines()) == 1
    assert (last / "state.json").read_text() == end


def test_nonfinite_stop_ends_the_run(tiny_config: Path, tmp_path: Path) -> None:
    class FaultyTrainer(Trainer):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * (math.nan if self.state.step == 4 else 1.0))

    assert train.main([str(tiny_config), "guard.nonfinite=stop"], trainer_cls=FaultyTrainer) == 70
    assert list(skipped_steps(tmp_path / "run")) == [5]
    assert "step 5: the gradient norm is not finite (nan)" in str(exit_record(tmp_path / "run")["cause"])


@pytest.mark.quick
def test_norm_limit_follows_the_median() -> None:
    guard = StepGuard(GuardConfig(grad_norm_spike=3.0), TrainState())
    for norm in range(1, MIN_ACCEPTED_NORMS):
        guard.record_accepted(float(norm))
        assert guard.norm_limit == math.inf
    guard.record_accepted(float(MIN_ACCEPTED_NORMS))
    assert guard.norm_limit == 3 * (MIN_ACCEPTED_NORMS + 1) / 2
    guard.skip(Skip(21, 1e9, "spike"), [])
    assert guard.norm_limit == 3 * (MIN_ACCEPTED_NORMS + 1) / 2
    for _ in range(NORM_WINDOW // 2 + 1):
        guard.record_accepted(100.0)
    assert guard.norm_limit == 300
    for _ in range(NORM_WINDOW):
        guard.record_accepted(0.5)
    assert guard.norm_limit == 1.5 and len(guard.state.accepted_norms) == NORM_WINDOW
    assert StepGuard(GuardConfig(), guard.state).norm_limit == math.inf
    zeros = TrainState(accepted_norms=[0.0] * MIN_ACCEPTED_NORMS)
    assert StepGuard(GuardConfig(grad_norm_spike=3.0), zeros).norm_limit == math.inf


@pytest.mark.quick
def test_consecutive_skips_end_the_run(tmp_path: Path) -> None:
    guard = StepGuard(GuardConfig(max_consecutive=3), TrainState())

    def skip(guard: StepGuard, norm: float, reason: Literal["loss", "norm", "spike"]) -> None:
        result = Skip(7, norm, reason)
        guard.skip(result, [])
        guard.check(result, tmp_path)

    skip(guard, math.nan, "loss")
    skip(guard, math.inf, "norm")
    guard.record_accepted(1.0)
    skip(guard, math.nan, "loss")
    skip(guard, math.inf, "norm")
    with pytest.raises(NumericalError, match=r"step 7: the gradient norm 8 is above .* row: 3 .*" + SKIPS_FILE):
        skip(guard, 8.0, "spike")
    assert guard.state.skipped_steps == 5
    strict = StepGuard(GuardConfig(nonfinite="stop"), TrainState())
    skip(strict, 8.0, "spike")
    with pytest.raises(NumericalError, match="row: 2"):
        skip(strict, math.nan, "norm")


@pytest.mark.quick
def test_an_overflow_of_fp16_is_no_skip_in_a_row(tmp_path: Path) -> None:
    """A run whose loss scale falls is not ended by it, and goes on counting real skips from where it was."""
    guard = StepGuard(GuardConfig(max_consecutive=2), state := TrainState())
    ranks = [[{"samples": {"train": [0]}, "loss": 1.0}]]
    for step, scale in enumerate((1024.0, 512.0, 256.0), 1):
        skip = Skip.classify(step, math.inf, ranks, scale)
        assert skip.reason == "overflow"
        guard.skip(skip, ranks)
        guard.check(skip, tmp_path)
    assert (state.skipped_steps, state.skipped_in_a_row) == (3, 0)
    guard.skip(Skip.classify(4, math.nan, ranks, MIN_SCALE), ranks)
    last = Skip.classify(5, math.nan, ranks, MIN_SCALE)
    guard.skip(last, ranks)
    with pytest.raises(NumericalError, match="skipped in a row: 2"):
        guard.check(last, tmp_path)
