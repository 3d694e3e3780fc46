"""Ratios with 95 % confidence intervals: of sums over documents, and of means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
SEEDS_METHOD = (
    "Student-t interval of the ratio of two means of independent samples by Fieller (1954), unequal variances allowed "
    "(degrees of freedom of Welch and Satterthwaite)"
)
_NORMAL_QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_NO_INTERVAL = (math.nan, math.nan)


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval.

    Attributes:
        value: The ratio; NaN if the denominator is 0.
        interval: (low, high); both NaN if there is no interval.
        standard_error: Of `value`; NaN if it is unknown, and for Fieller's intervals, which have none.
        no_interval_reason: Why there is no interval; "" if there is one.
    """

    value: float
    interval: tuple[float, float] = _NO_INTERVAL
    standard_error: float = math.nan
    no_interval_reason: str = ""

    def __mul__(self, factor: float) -> Ratio:
        low, high = self.interval
        return Ratio(
            self.value * factor, (low * factor, high * factor), self.standard_error * factor, self.no_interval_reason
        )


def ratio_of_sums(numerators: np.ndarray, denominators: np.ndarray) -> Ratio:
    """Return sum(numerators) / sum(denominators) of n documents drawn at random; a mean if the denominators are 1.

    The standard error is the one of the linearized ratio (Cochran, Sampling Techniques, 3rd edition, section 2.11):
    with residuals r = numerators - ratio denominators, std(r) / (mean(denominators) sqrt(n)). The interval is
    Student's t with n - 1 degrees of freedom. A single document has neither.
    """
    value = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return Ratio(value, no_interval_reason="n = 1")
    residuals = numerators - value * denominators
    error = float(residuals.std(ddof=1)) / float(denominators.mean()) / math.sqrt(len(residuals))
    margin = error * student_quantile(len(residuals) - 1)
    return Ratio(value, (value - margin, value + margin), error)


def mean_of_draws(values: np.ndarray) -> Ratio:
    """Return the mean of n independent draws with its Student-t interval, for which 4 are needed."""
    if len(values) < 4:
        return Ratio(float(values.mean()), no_interval_reason=f"n = {len(values)}")
    return ratio_of_sums(values, np.ones(len(values)))


def student_quantile(degrees: int) -> float:
    """Return the two-sided quantile of Student's t at `CONFIDENCE`.

    From 3 degrees of freedom on it is its expansion in their inverse (Abramowitz and Stegun, 26.7.5), to 1 % or better.
    """
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z = _NORMAL_QUANTILE
    terms = z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return sum(term / degrees**power for power, term in enumerate(terms))


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
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for one seed."""
        return None if self.std is None else self.std / math.sqrt(self.n)


def ratio_of_means(stats: SeedStats, baseline: SeedStats) -> Ratio:
    """Return the mean of `stats` divided by the mean of `baseline`, with Fieller's interval.

    The interval (E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16, 1954, 175-185;
    explained by V. H. Franz, arXiv 0710.2024) has all ratios r for which Student's t test of

        T(r) = (x - r b) / sqrt(u + r^2 v)

    cannot distinguish x from r b. x and b are the means of two independent samples, u and v the squares of their
    standard errors. Equal variances are not assumed: the degrees of freedom are those of Welch and Satterthwaite
    (B. L. Welch, Biometrika 34, 1947, 28-35) for x - r b at the estimated ratio.
    """
    if baseline.mean == 0:
        return Ratio(math.nan, no_interval_reason="baseline 0")
    ratio = stats.mean / baseline.mean
    error, baseline_error = stats.standard_error, baseline.standard_error
    if error is None or baseline_error is None:
        return Ratio(ratio, no_interval_reason="n = 1")
    u, v = error**2, baseline_error**2
    if u + ratio**2 * v == 0:  # no spread, or none but the baseline's around a mean of 0
        return Ratio(ratio, (ratio, ratio))
    squared = _t_quantile(_welch_degrees(u, stats.n, ratio**2 * v, baseline.n)) ** 2
    # T(r)^2 = t^2 is a r^2 - 2 c r + d = 0. Its roots bound an interval if b differs from 0, which means a > 0.
    a, c, d = baseline.mean**2 - squared * v, stats.mean * baseline.mean, stats.mean**2 - squared * u
    if a <= 0:
        return Ratio(ratio, no_interval_reason="interval without bound")
    # For a > 0 the discriminant is negative only by rounding.
    root = math.sqrt(max(c**2 - a * d, 0.0))
    return Ratio(ratio, ((c - root) / a, (c + root) / a))


def _welch_degrees(u: float, n: int, v: float, m: int) -> float:
    """Return the degrees of freedom of the sum of two squared standard errors, over `n` and `m` values."""
    return (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1))


def _t_quantile(degrees: float) -> float:
    """Return the two-sided quantile of Student's t at `CONFIDENCE`."""
    from scipy.special import stdtrit  # imported here: only comparisons of several seeds need scipy

    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
