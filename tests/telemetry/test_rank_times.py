"""A rank that computes more slowly than the others is named soon, and noise names none."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.telemetry.rank_times import WINDOW, RankTimes, SpeedChange

pytestmark = pytest.mark.quick
HOUR = 36_000  # steps of 0.1 s


def noise(kind: str, spread: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Logarithms of what delays the steps of each rank."""
    if kind == "heavy-tailed":
        return spread * rng.standard_t(2, shape).clip(-50, 50)
    if kind == "pauses":  # one in twenty steps takes up to several times as long
        return spread * rng.standard_normal(shape) + (rng.random(shape) < 0.05) * rng.exponential(1.0, shape)
    values = spread * rng.standard_normal(shape)
    if kind == "autocorrelated":
        for step in range(1, len(values)):
            values[step] = 0.5 * values[step - 1] + np.sqrt(0.75) * values[step]
    return values


def step_work(steps: int, ranks: int, kind: str, spread: float, seed: int = 0) -> np.ndarray:
    """[steps, 2, ranks]: half of a step's time is proportional to its FLOPs, which differ between the ranks."""
    rng = np.random.default_rng(seed)
    flops = np.exp(0.05 * rng.standard_normal((steps, ranks)))
    return np.stack([(0.5 + 0.5 * flops) * np.exp(noise(kind, spread, (steps, ranks), rng)), flops], axis=1)


def changes(work: np.ndarray) -> list[tuple[int, SpeedChange]]:
    """Changes by step, counted from 1."""
    times = RankTimes(work.shape[-1])
    return [(step, change) for step, values in enumerate(work, 1) for change in times.add(values)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "spread"),
    [("normal", 0.03), ("normal", 0.3), ("heavy-tailed", 0.1), ("pauses", 0.05), ("autocorrelated", 0.04)],
)
def test_noise_names_nobody(kind: str, spread: float, ranks: int) -> None:
    assert changes(step_work(HOUR // 20, ranks, kind, spread)) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize(
    ("kind", "spread"), [("normal", 0.05), ("heavy-tailed", 0.1), ("pauses", 0.05), ("autocorrelated", 0.04)]
)
def test_an_hour_of_noise_names_nobody(kind: str, spread: float, ranks: int) -> None:
    assert changes(step_work(HOUR, ranks, kind, spread, seed=1)) == []


@pytest.mark.parametrize("ranks", [2, 4, 1024])
@pytest.mark.parametrize(("kind", "spread"), [("normal", 0.03), ("heavy-tailed", 0.02), ("pauses", 0.03)])
def test_slow_rank_is_named_within_20_steps_and_recovers(kind: str, spread: float, ranks: int) -> None:
    work = step_work(150, ranks, kind, spread, seed=2)
    work[50:100, 0, 1] *= 1.2
    (named, slow), (recovered, fast) = changes(work)
    assert (slow.rank, slow.slow, fast.rank, fast.slow) == (1, True, 1, False)
    assert 50 < named <= 70 and 0.13 < slow.slowdown < 0.27
    assert 100 < recovered <= 100 + WINDOW and fast.slowdown < 0.05


def test_several_slow_ranks() -> None:
    """A slow host has several of the ranks, here three of eight."""
    work = step_work(20, 8, "normal", 0.03)
    work[:, 0, 5:] *= 1.3
    assert {change.rank for _, change in changes(work)} == {5, 6, 7}


@pytest.mark.parametrize("constant", [0.0, 0.5, 1.0])
def test_longer_samples_do_not_make_a_rank_slow(constant: float) -> None:
    """Rank 0 always gets the shortest samples and rank 3 the longest, whatever part of a step's time is constant."""
    work = step_work(200, 4, "normal", 0.02)
    work[:, 1] = [0.7, 0.9, 1.1, 1.3]
    work[:, 0] *= constant + (1 - constant) * work[:, 1]
    assert changes(work) == []


def test_steps_that_arrive_late_count_once() -> None:
    """A GPU's steps are measured later than the host's: at first one rank has none, and then two in one."""
    work = step_work(60, 4, "normal", 0.02)
    late = work.copy()
    late[::2, :, 2] = 0
    late[1::2, :, 2] += work[::2, :, 2]
    times = RankTimes(4)
    assert [change for values in late for change in times.add(values)] == []
    record = times.record()
    assert record["speed/compute_s"] == pytest.approx(2 * np.median(work[:, 0].mean(0)), rel=0.05)
    assert times.record() == {}, "since the last record"
