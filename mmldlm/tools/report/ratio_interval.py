"""The ratio of two means over seeds, with its Student-t interval.

The interval is Fieller's (E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16, 1954, 175-185;
readable in V. H. Franz, arXiv 0710.2024): all ratios r for which Student's t, of

    T(r) = (x - r b) / sqrt(u + r^2 v)

does not tell x from r b. x and b are the means of two independent samples, u and v the squares of their standard
errors. Equal variances are not assumed: the degrees of freedom are those of Welch and Satterthwaite (B. L. Welch,
Biometrika 34, 1947, 28-35) for x - r b at the ratio found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
METHOD = (
    "Student-t interval of the ratio of two means of independent samples by Fieller (1954), unequal variances allowed "
    "(degrees of freedom of Welch and Satterthwaite)"
)


@dataclass(frozen=True)
class Sample:
    """One value a seed, as mean, standard deviation (with n - 1; None for one seed) and n."""

    mean: float
    deviation: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), deviation, len(values))

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.n)


@dataclass(frozen=True)
class Ratio:
    """`value` is None where the baseline is 0, `interval` where there is none; then `why` says the reason."""

    value: float | None
    interval: tuple[float, float] | None = None
    why: str = ""


def ratio(sample: Sample, baseline: Sample, confidence: float = CONFIDENCE) -> Ratio:
    """How many times the baseline's mean the mean of `sample` is."""
    if baseline.mean == 0:
        return Ratio(None, why="baseline 0")
    found = sample.mean / baseline.mean
    error, base_error = sample.error, baseline.error
    if error is None or base_error is None:
        return Ratio(found, why="n = 1")
    u, v = error**2, base_error**2
    if u + v == 0:
        return Ratio(found, (found, found))
    squared = _quantile(confidence, _degrees(u, sample.n, found**2 * v, baseline.n)) ** 2
    # T(r)^2 = t^2 is a r^2 - 2 c r + d = 0. Its roots bound an interval where b differs from 0, which is a > 0.
    a, c, d = baseline.mean**2 - squared * v, sample.mean * baseline.mean, sample.mean**2 - squared * u
    if a <= 0:
        return Ratio(found, why="interval without bound")
    root = math.sqrt(max(c**2 - a * d, 0.0))
    return Ratio(found, ((c - root) / a, (c + root) / a))


def _degrees(u: float, n: int, v: float, m: int) -> float:
    """Of the sum of two squared standard errors, over `n` and `m` values."""
    return (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1))


def _quantile(confidence: float, degrees: float) -> float:
    """Of Student's t, two-sided."""
    from scipy.special import stdtrit  # here, since only several seeds need it

    return float(stdtrit(degrees, (1 + confidence) / 2))
