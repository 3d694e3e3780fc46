"""Choices among candidates, the save interval, and the fit of a calibration: closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.batch_schedule import TrainConfig
from mmldlm.data.mixture import open_data
from mmldlm.tools.plan.calibration import fit, non_negative
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


def test_a_fit_finds_its_coefficients() -> None:
    rows = np.random.default_rng(0).uniform(1, 10, (14, 4)) * [1, 1e9, 1e3, 1]
    true = np.array([0.2, 3e-10, 0.0, 0.5])
    fitted = fit(rows, rows @ true)
    assert fitted.coefficients == pytest.approx(true, abs=1e-12, rel=1e-6) and fitted.factor == pytest.approx(1)


def test_no_coefficient_is_negative_where_least_squares_has_one() -> None:
    draw = np.random.default_rng(1)
    rows = draw.uniform(1, 2, (12, 3))
    seconds = rows @ [1.0, 0.5, -0.2]
    assert (np.linalg.lstsq(rows / seconds[:, None], np.ones(12), rcond=None)[0] < 0).any()
    found = non_negative(rows, seconds)
    assert (found >= 0).all() and found.any()

    def error(coefficients: np.ndarray) -> float:
        return float(((rows @ coefficients / seconds - 1) ** 2).sum())

    tries = (np.maximum(found + 0.02 * draw.standard_normal(3), 0) for _ in range(200))
    assert all(error(found) <= error(other) for other in tries)


def test_the_interval_grows_with_the_scatter() -> None:
    draw = np.random.default_rng(2)
    rows = draw.uniform(1, 10, (14, 2))
    factors = [fit(rows, rows @ [1.0, 2.0] * np.exp(s * draw.standard_normal(14))).factor for s in (0.02, 0.2)]
    assert 1.01 < factors[0] < 1.1 < factors[1]
