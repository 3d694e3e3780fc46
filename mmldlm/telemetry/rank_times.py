"""Names the ranks that compute more slowly than the others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WINDOW = 16  # steps: a rank that becomes slow is named within 20
SLOWDOWN = 0.10  # in the median step of the window
MIN_SLOWDOWN = 0.05  # in almost every step of it
MAX_FASTER_STEPS = 2
MIN_DEVIATIONS = 3.0  # of the median from 0, in median absolute deviations: 6.5 standard errors of normal noise


def slowdowns(seconds: np.ndarray) -> np.ndarray:
    """Return the logarithm of seconds [..., ranks] over the median of the others, for ranks slower than that."""
    ordered, ranks = np.sort(seconds, axis=-1), seconds.shape[-1]
    # Without the slowest: for a slow rank this is the median of the others, also if there is only one.
    others = (ordered[..., (ranks - 2) // 2] + ordered[..., (ranks - 1) // 2]) / 2
    return np.log(seconds / others[..., None])


def slow_ranks(window: np.ndarray) -> np.ndarray:
    """Return which ranks are slow, beyond noise, bool [ranks]; one has to be slow by each measure.

    `window` has the `slowdowns`, [steps, measures, ranks].
    """
    slow = ((window > np.log1p(MIN_SLOWDOWN)).sum(0) >= len(window) - MAX_FASTER_STEPS).all(0)
    if slow.any():
        chosen = window[..., slow]
        median = np.median(chosen, axis=0)
        deviation = np.median(np.abs(chosen - median), axis=0)
        slow[slow] = (median > np.maximum(np.log1p(SLOWDOWN), MIN_DEVIATIONS * deviation)).all(0)
    return slow


class SpeedChange(NamedTuple):
    """A rank that became slow or has recovered."""

    rank: int
    slow: bool
    slowdown: float  # of its compute time in the last steps, relative to the median of the other ranks


class RankTimes:
    """Compute times of all ranks, step by step, as `Trainer.sync` exchanges them.

    A rank is slow if its steps take longer than those of the others, in total and per FLOP: the time of a step has a
    constant part that is not known, so neither alone is fair to ranks whose samples are always the longest or shortest.
    """

    def __init__(self, ranks: int):
        self.slow: set[int] = set()
        self._window = np.zeros((WINDOW, 2, ranks))  # a ring
        self._steps = 0
        self._pending = np.zeros((2, ranks))
        self._seconds, self._seconds_steps = np.zeros(ranks), 0

    def add(self, work: np.ndarray) -> list[SpeedChange]:
        """Add a step's seconds and FLOPs of each rank, [2, ranks]; return which ranks became slow or have recovered.

        On GPUs a step may be missing at first, which then is part of a later one.
        """
        self._pending += work
        if not self._pending[1].all():
            return []
        seconds, flops = self._pending
        self._seconds += seconds
        self._seconds_steps += 1
        self._window[self._steps % WINDOW] = slowdowns(np.stack([seconds, seconds / flops]))
        self._steps += 1
        self._pending = np.zeros_like(work)
        if self._steps < WINDOW:
            return []
        slow = set(slow_ranks(self._window).nonzero()[0].tolist())
        recovered = {rank for rank in self.slow if self._slowdown(rank) < MIN_SLOWDOWN}
        changed = (slow - self.slow) | recovered
        self.slow = (self.slow | slow) - recovered
        return [SpeedChange(rank, rank in slow, self._slowdown(rank)) for rank in sorted(changed)]

    def _slowdown(self, rank: int) -> float:
        return float(np.expm1(np.median(self._window[..., rank], axis=0).min()))

    def record(self) -> dict[str, float]:
        """Return the compute time of the median rank and of the slowest in a step, since the last call."""
        if not self._seconds_steps:
            return {}
        seconds = self._seconds / self._seconds_steps
        self._seconds, self._seconds_steps = np.zeros_like(seconds), 0
        return {"speed/compute_s": float(np.median(seconds)), "speed/compute_s_slowest": float(seconds.max())}
