"""Choices among candidates and the save interval: closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.mixture import open_data
from mmldlm.tools.plan.candidates import (
    GPU_HOURS_BETWEEN_FAILURES,
    Candidate,
    _micro_batches,
    choose,
    memory_interval,
    save_interval,
)

pytestmark = pytest.mark.quick


def candidate(engine: str, seconds: float, mib: float, capacity: float = 1000.0) -> Candidate:
    interval = (seconds, seconds / 1.1, seconds * 1.1)
    return Candidate(engine, "none", TrainConfig(), 100.0, memory_interval(mib), interval, capacity)


def test_the_fastest_that_fits_is_chosen() -> None:
    candidates = [candidate("ddp", 1.0, 950.0), candidate("fsdp2", 1.5, 500.0), candidate("zero3", 1.4, 500.0)]
    assert choose(candidates) is candidates[2]
    assert not candidates[0].fits  # 950 MiB are less than 1,000, but not at the upper end of the interval
    assert candidates[0].excess_mib == pytest.approx(950 / 0.9 - 1000)
    assert choose(candidates[:1]) is None


def test_a_tie_goes_to_the_simpler_engine() -> None:
    assert choose([candidate("zero3", 1.0, 1.0), candidate("ddp", 1.01, 1.0)]).engine == "ddp"  # type: ignore[union-attr]
    assert choose([candidate("zero3", 1.0, 1.0), candidate("ddp", 1.05, 1.0)]).engine == "zero3"  # type: ignore[union-attr]


def test_candidates_are_close_as_long_as_intervals_overlap() -> None:
    best = candidate("ddp", 1.0, 1.0)
    assert candidate("fsdp2", 1.2, 1.0).is_close_to(best)
    assert not candidate("fsdp2", 1.22, 1.0).is_close_to(best)


def test_the_save_interval_wastes_least() -> None:
    save, failures = 50.0, 86_400.0
    best = save_interval(save, failures)
    assert best == pytest.approx(2939.4, abs=0.1)

    def waste(interval: float) -> float:
        return save / interval + interval / 2 / failures  # saves, and half an interval lost at each failure

    assert all(waste(best) < waste(best * factor) for factor in (0.5, 0.95, 1.05, 2.0))
    assert pytest.approx(54 * 24 / 419) == GPU_HOURS_BETWEEN_FAILURES / 16_384


def test_micro_batches_divide_the_share_of_a_rank(tiny_store: Path) -> None:
    store = open_data(str(tiny_store))
    sizes = [train.micro_batch_size for train in _micro_batches(TrainConfig(global_batch_size=48), store, 4)]
    assert sizes == [12, 6, 3, 1]
    budgets = [train.micro_batch_tokens for train in _micro_batches(TrainConfig(micro_batch_tokens=256), store, 4)]
    assert budgets[:3] == [1024, 512, 256] and budgets[-1] >= store.split("train").mean_length > budgets[-1] // 2
