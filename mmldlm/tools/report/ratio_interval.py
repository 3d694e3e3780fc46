"""The ratio of two means over seeds, with its Student-t interval.

The interval is Fieller's (E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16, 1954, 175-185;
explained by V. H. Franz, arXiv 0710.2024): all ratios r for which Student's t test of

    T(r) = (x - r b) / sqrt(u + r^2 v)

cannot distinguish x from r b. x and b are the means of two independent samples, u and v the squares of their standard
errors. Equal variances are not assumed: the degrees of freedom are those of Welch and Satterthwaite (B. L. Welch,
Biometrika 34, 1947, 28-35) for x - r b at the estimated ratio.
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
class SeedStats:
    """Mean, standard deviation (with n - 1; None for one seed) and count of one value per seed."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> SeedStats:
        """Return the statistics of `values`, one per seed."""
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(float(np.mean(values)), std, len(values))

    @property
    def std_error(self) -> float | None:
        """Standard error of the mean; None for one seed."""
        return None if self.std is None else self.std / math.sqrt(self.n)


@dataclass(frozen=True)
class RatioEstimate:
    """A ratio of means and its interval.

    Attributes:
        value: The ratio; None if the baseline's mean is 0.
        interval: (low, high); None if it cannot be computed.
        no_interval_reason: Why `interval` is None, otherwise "".
    """

    value: float | None
    interval: tuple[float, float] | None = None
    no_interval_reason: str = ""


def ratio_of_means(stats: SeedStats, baseline: SeedStats, confidence: float = CONFIDENCE) -> RatioEstimate:
    """Return the mean of `stats` divided by the mean of `baseline`, with Fieller's interval."""
    if baseline.mean == 0:
        return RatioEstimate(None, no_interval_reason="baseline 0")
    ratio = stats.mean / baseline.mean
    error, base_error = stats.std_error, baseline.std_error
    if error is None or base_error is None:
        return RatioEstimate(ratio, no_interval_reason="n = 1")
    u, v = error**2, base_error**2
    if u + v == 0:
        return RatioEstimate(ratio, (ratio, ratio))
    squared = _t_quantile(confidence, _welch_degrees(u, stats.n, ratio**2 * v, baseline.n)) ** 2
    # T(r)^2 = t^2 is a r^2 - 2 c r + d = 0. Its roots bound an interval if b differs from 0, which means a > 0.
    a, c, d = baseline.mean**2 - squared * v, stats.mean * baseline.mean, stats.mean**2 - squared * u
    if a <= 0:
        return RatioEstimate(ratio, no_interval_reason="interval without bound")
    root = math.sqrt(max(c**2 - a * d, 0.0))
    return RatioEstimate(ratio, ((c - root) / a, (c + root) / a))


def _welch_degrees(u: float, n: int, v: float, m: int) -> float:
    """Return the degrees of freedom of the sum of two squared standard errors, over `n` and `m` values."""
    return (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1))


def _t_quantile(confidence: float, degrees: float) -> float:
    """Return the two-sided quantile of Student's t."""
    from scipy.special import stdtrit  # imported here: only comparisons of several seeds need scipy

    return float(stdtrit(degrees, (1 + confidence) / 2))
