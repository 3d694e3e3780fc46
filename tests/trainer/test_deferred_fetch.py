"""What a step came to is read off the device late and in one go: the host waits for nothing in between, and nothing of
the run changes by it.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.distributed.engine import is_accepted
from mmldlm.trainer.step_numbers import StepResult
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import exit_record, records
from tests.helpers.faulty_steps import FAULTS, run_with_faults, skipped_steps
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.metrics import read_metrics

TIMES = ("time", "stall_s", "seconds", "path", "hash")
SETTINGS = (
    "train={steps: 23, global_batch_size: 4, micro_batch_size: 1}",
    "log.every=5",
    "guard.max_consecutive=4",
    "checkpoint.every_steps=8",
    "validation={every: 12, first: 0, samples: 8, text_samples: 0}",
)
# The last of the steps that are fetched together: for a record, a save, a validation, the end, or as the fourth.
FETCHED = [4, 5, 8, 10, 12, 15, 16, 20, 23]
GROWING = "train.batch_schedule={3: {global_batch_size: 12}, 12: {global_batch_size: 16}}"
UNTIL_SPIKE = [fault for fault in FAULTS if fault["kind"] != "huge"]


def history(folder: Path) -> list[dict[str, Any]]:
    """All that metrics.jsonl says, but how long things took, and when a checkpoint was there."""
    return [
        {key: value for key, value in record.items() if key not in TIMES and not key.startswith(("speed", "memory"))}
        for record in read_metrics(folder / "metrics.jsonl")
        if record["kind"] in ("train", "validation", "skip", "heartbeat", "end")
    ]


@pytest.mark.parametrize(
    ("engine", "faults", "settings"),
    [
        pytest.param("single", [], (), marks=pytest.mark.slow),  # most steps of the next one have no fault either
        ("single", UNTIL_SPIKE, ()),
        pytest.param("single", UNTIL_SPIKE, ("optim.fused=false",), marks=pytest.mark.slow),
        pytest.param("single", UNTIL_SPIKE, (GROWING,), marks=pytest.mark.slow),
        pytest.param("ddp", UNTIL_SPIKE, (), marks=pytest.mark.slow),
        ("fsdp2", UNTIL_SPIKE, ()),
    ],
    ids=["finite", "single", "not-fused", "batch-schedule", "ddp", "fsdp2"],
)
def test_deferred_fetch_does_not_change_the_run(
    engine: str, faults: list[Any], settings: tuple[str, ...], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    at_once, late = tmp_path / "at-once", tmp_path / "late"
    arguments = (parity_config, *SETTINGS, *settings)
    expected = run_with_faults(forked, engine, at_once, faults, *arguments)
    result = run_with_faults(forked, engine, late, faults, *arguments, LATE="1")
    assert [rank["fetched"] for rank in expected] == [list(range(1, 24))] * len(result)
    assert [rank["fetched"] for rank in result] == [FETCHED] * len(result)
    assert [rank["digests"] for rank in result] == [rank["digests"] for rank in expected]
    assert history(late) == history(at_once)
    planted = [fault["step"] + 1 for fault in faults]
    assert list(records(late, "skip")) == planted and len(records(late)) == 5
    skips = [skipped_steps(folder) for folder in (late, at_once)]
    late_lines, lines = ([{**line, "time": 0, "hash": ""} for line in each.values()] for each in skips)
    assert late_lines == lines
    assert list(skips[0]) == planted
    states = [(folder / "checkpoints" / "step-00000023" / "state.json").read_text() for folder in (late, at_once)]
    assert states[0] == states[1] and json.loads(states[0])["skipped_steps"] == len(faults)


@pytest.mark.parametrize("engine", ["single", pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_no_host_reads_between_records(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    settings = ["train.steps=10", "log.every=5", "validation.every=0", "checkpoint.every_steps=0", "ema.decay=0.9"]
    settings += ["guard.verify_updates_every=0"]
    count = 1 if engine == "single" else 2
    forked.succeed(engine, folder, count, parity_config, *settings, script="host_reads.py", FACTS=str(folder))
    for rank in range(count):
        reads = json.loads((folder / f"reads.rank{rank}.json").read_text())
        assert {int(step): bool(result) for step, result in reads.items()} == {
            step: step in (5, 10) for step in range(1, 11)
        }, reads


@pytest.mark.parametrize(("every", "slow", "step_s"), [(1, 7, 2.0), (2, 6, 2.0), (5, 10, 1.25)])
def test_the_time_of_a_record_is_that_of_its_own_steps(
    every: int, slow: int, step_s: float, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validations and saves read the numbers of steps between records."""
    clock = [0.0]

    class ClockTrainer(DeferringTrainer):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * (math.nan if self.state.step == 5 else 1.0))  # the sixth step is skipped
            clock[0] += 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    settings = [f"log.every={every}", "train.steps=20", "checkpoint.every_steps=6", "guard.verify_updates_every=0"]
    assert train.main([str(tiny_config), *settings], trainer_cls=ClockTrainer) == 0
    times = {step: record["speed/step_s"] for step, record in records(tmp_path / "run").items()}
    # The time of a skipped step counts for its record, or for the next one if it would be alone in it.
    assert times == {step: 1.0 for step in range(every, 21, every) if (every, step) != (1, 6)} | {slow: step_s}


class DeferringTrainer(Trainer):
    """A trainer that fetches the numbers of its steps as on a GPU."""

    def __enter__(self) -> DeferringTrainer:
        super().__enter__()
        self.numbers.defer_fetch = True
        return self


def test_a_stop_comes_late_and_saves_nothing_after_it(tiny_config: Path, tmp_path: Path) -> None:
    class FaultyTrainer(DeferringTrainer):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * (math.nan if self.state.step == 4 else 1.0))

    arguments = [str(tiny_config), "guard.nonfinite=stop", "log.every=100"]
    assert train.main(arguments, trainer_cls=FaultyTrainer) == 70
    assert list(skipped_steps(tmp_path / "run")) == [5]
    record = exit_record(tmp_path / "run")
    assert "step 5: the gradient norm is not finite (nan)" in str(record["cause"]) and record["step"] == 8
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_a_spike_limit_fetches_every_step(tiny_config: Path) -> None:
    """The limit is a function of the norms of earlier steps."""
    pending: list[int] = []

    class WatchedTrainer(DeferringTrainer):
        def update(self, step: int) -> StepResult:
            pending.append(len(self.numbers.pending))
            return super().update(step)

    settings = ["log.every=100", "validation.every=0", "checkpoint.every_steps=0"]
    assert train.main([str(tiny_config), *settings], trainer_cls=WatchedTrainer) == 0
    assert pending == list(range(8))
    limited = [*settings, "resume=never", "guard.grad_norm_spike=9"]
    assert train.main([str(tiny_config), *limited], trainer_cls=WatchedTrainer) == 0
    assert pending[8:] == [0] * 8


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_reaches_every_gradient(value: float, tiny_config: Path) -> None:
    with Trainer(load_config(tiny_config, ["data.num_workers=0"])) as run:
        step, micro_batches = next(run.steps())
        (noised,) = run.corrupt(step, micro_batches)
        loss, _ = run.loss(noised, run.sync(step, [noised]).denominators)
        run.backward(loss + value)
        gradients = {name: parameter.grad for name, parameter in run.engine.model.named_parameters()}
        assert {name for name, result in gradients.items() if result is None or not result.isnan().any()} == set()


@pytest.mark.quick
def test_norm_limit_is_equal_in_every_precision() -> None:
    norm = torch.tensor(0.1)  # in float32 a little above 0.1
    assert not is_accepted(norm, 0.1) and is_accepted(norm, float(norm)) and is_accepted(norm.double(), float(norm))
    assert is_accepted(torch.tensor(3e38), math.inf) and is_accepted(torch.tensor(1e300, dtype=torch.float64), math.inf)
    assert not any(
        is_accepted(torch.tensor(value), limit) for value in (math.nan, math.inf) for limit in (1.0, math.inf)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_gpu_synchronization_in_a_step(tiny_config: Path) -> None:
    settings = ["data.num_workers=0", "log.every=4", "validation.every=0", "checkpoint.every_steps=0", "ema.decay=0.9"]
    with Trainer(load_config(tiny_config, settings)) as run:
        assert run.numbers.defer_fetch
        for step, micro_batches in run.steps():
            torch.cuda.set_sync_debug_mode("error" if step + 1 in (2, 3, 5, 6, 7) else "default")  # records at 4 and 8
            train.train_step(run, step, micro_batches)
            torch.cuda.set_sync_debug_mode("default")
