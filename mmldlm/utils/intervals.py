"""95 % confidence intervals of ratios, means, differences of means, and running means."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95 % confidence interval.

    Attributes:
        interval: (low, high), both NaN if there is no interval.
        standard_error: Standard error of `value`, NaN if unknown.
        no_interval_reason: Why there is no interval, empty if there is one.
    """

    value: float
    interval: tuple[float, float] = (math.nan, math.nan)
    standard_error: float = math.nan
    no_interval_reason: str = ""

    def __mul__(self, factor: float) -> Ratio:
        low, high = self.interval
        return Ratio(
            self.value * factor, (low * factor, high * factor), self.standard_error * factor, self.no_interval_reason
        )


def ratio_of_sums(numerators: np.ndarray, denominators: np.ndarray) -> Ratio:
    """Return sum(numerators) / sum(denominators) of n documents drawn at random (a mean if the denominators are 1).

    The standard error comes from the linearized ratio (Cochran, Sampling Techniques, 3rd edition, section 2.11). With
    residuals r = numerators - ratio denominators it is std(r) / (mean(denominators) sqrt(n)). The interval is Student's
    t with n - 1 degrees of freedom. A single document has neither.
    """
    value = float(numerators.sum() / denominators.sum())
    if len(numerators) < 2:
        return Ratio(value, no_interval_reason="n = 1")
    residuals = numerators - value * denominators
    error = float(residuals.std(ddof=1)) / float(denominators.mean()) / math.sqrt(len(residuals))
    margin = error * student_quantile(len(residuals) - 1)
    return Ratio(value, (value - margin, value + margin), error)


def mean_of_draws(values: np.ndarray) -> Ratio:
    """Return the mean of n independent draws with its Student-t interval, which needs at least 4 draws."""
    if len(values) < 4:
        return Ratio(float(values.mean()), no_interval_reason=f"n = {len(values)}")
    return ratio_of_sums(values, np.ones(len(values)))


@functools.cache
def student_quantile(degrees: int, risk: float = 1 - CONFIDENCE) -> float:
    """Return the quantile that the absolute value of Student's t exceeds with probability `risk`.

    We bisect its distribution over the angle arctan(t / sqrt(degrees)) (Abramowitz and Stegun, 26.7.3 and 26.7.4). More
    than 1,000 degrees of freedom count as 1,000, which widens an interval by 0.1 %.
    """
    degrees = min(degrees, 1000)
    odd, low, high = degrees % 2, 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        total, term = 0.0, 1.0
        for k in range(degrees // 2):
            total += term
            term *= math.cos(angle) ** 2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
        inside = 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total) if odd else math.sin(angle) * total
        low, high = (angle, high) if 1 - inside > risk else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def welch_half_width(a: np.ndarray, b: np.ndarray) -> float:
    """Return the half-width of the interval of mean(b) - mean(a) of independent samples (infinite for a single value).

    Variances may differ (B. L. Welch, Biometrika 34, 1947, 28-35). We round the degrees of freedom down, which never
    makes an interval narrower.
    """
    n, m = len(a), len(b)
    if min(n, m) < 2:
        return math.inf
    u, v = a.var(ddof=1) / n, b.var(ddof=1) / m  # squared standard errors
    if u + v == 0:
        return 0.0
    degrees = (u + v) ** 2 / (u**2 / (n - 1) + v**2 / (m - 1))
    return float(student_quantile(math.floor(degrees + 1e-9)) * math.sqrt(u + v))


def confidence_sequence(values: np.ndarray, effect_variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each n, the mean of the first n values and the half-width of its interval (infinite for small n).

    The intervals hold at all n together, however often you look. They contain all means that Lai's t-test martingale
    with a normal mixture over effects does not reject (Wang and Ramdas, "Anytime-valid t-tests and confidence sequences
    for Gaussian means with unknown variance", arXiv 2310.03722). With Student's t of n values, r = 1 + n g and q = (r /
    alpha^2)^(1/n), the interval is

        t^2 < (n - 1) (q - 1) / (1 - q / r), if q < r.

    If the values are independent and normal with one mean, the intervals cover that mean at all n together with a
    probability of at least 95 %. For large n we get the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha,
    Kennedy and Ramdas ("Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476). It
    requires neither independence nor a common mean: it covers the running average of E[value | all values before].

    Args:
        values: The values in order, at least one.
        effect_variance: Variance g of the mixture over mean / standard deviation. It is tightest near n = 8 / g.
    """
    n = np.arange(1, len(values) + 1)
    shifted = values - values[0]  # centered, so that the sum of squares keeps its digits
    means = np.cumsum(shifted) / n
    squared_errors = np.maximum(np.cumsum(shifted**2) / n - means**2, 0) / np.maximum(n - 1, 1)
    r = 1 + n * effect_variance
    q = (r / (1 - CONFIDENCE) ** 2) ** (1 / n)
    half_widths = np.full(len(n), np.inf)
    bounded = (q < r) & (n > 1)
    squared_t = (n - 1) * (q - 1) / np.where(bounded, 1 - q / r, 1)
    half_widths[bounded] = np.sqrt(squared_t * squared_errors)[bounded]
    return means + values[0], half_widths
