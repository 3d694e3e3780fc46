"""Intervals of known means: those that hold at all times together, and Welch's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mmldlm.utils.intervals import confidence_sequence, welch_half_width

SEQUENCES = 1000


def miss_rate(values: np.ndarray, means: np.ndarray, effect_variance: float, first: int = 0) -> tuple[float, float]:
    """Share of the sequences whose interval misses the mean of the first n at some n; the same for naive intervals."""
    missed, naive = [], []
    for row, truth in zip(values, means, strict=True):
        estimates, half_widths = confidence_sequence(row, effect_variance)
        errors = np.abs(estimates - np.cumsum(truth) / np.arange(1, len(truth) + 1))
        missed.append((errors > half_widths)[first:].any())
        naive.append((errors > 1.96 * row.std() / np.sqrt(np.arange(1, len(row) + 1)))[first:].any())
    return float(np.mean(missed)), float(np.mean(naive))


@pytest.mark.parametrize(("effect_variance", "length"), [(10.0, 12), (0.08, 300)])
def test_normal_values(effect_variance: float, length: int) -> None:
    values = 3 + 0.1 * np.random.default_rng(0).standard_normal((SEQUENCES, length))
    missed, naive = miss_rate(values, np.full_like(values, 3.0), effect_variance)
    assert missed <= 0.05 < 0.15 < naive


def test_means_that_drift_with_the_past() -> None:
    """The running average of the conditional means is covered: each depends on the noise before it."""
    noise = np.random.default_rng(1).standard_normal((SEQUENCES, 300)) * np.linspace(2, 0.5, 300)
    means = 0.3 * np.cumsum(np.pad(noise, ((0, 0), (1, 0)))[:, :-1], 1) / np.sqrt(np.arange(1, 301))
    missed, naive = miss_rate(means + noise, means, 0.08, first=9)
    assert missed <= 0.05 < naive


def test_shape() -> None:
    """No interval for few values; it shrinks, and follows units and offsets."""
    values = np.random.default_rng(2).standard_normal(400)
    means, half_widths = confidence_sequence(values, 0.08)
    assert np.isinf(half_widths[0]) and half_widths[399] < half_widths[50] < np.inf
    np.testing.assert_allclose(means, np.cumsum(values) / np.arange(1, 401))
    scaled = confidence_sequence(1e6 + 1e-3 * values, 0.08)[1]
    np.testing.assert_allclose(scaled[50:], 1e-3 * half_widths[50:], rtol=1e-5)
    assert confidence_sequence(np.full(50, 2.5), 0.08)[1][-1] == 0, "two runs of one config and seed"


@pytest.mark.parametrize(("n", "m", "scale"), [(4, 5, 0.5), (3, 3, 1.0), (2, 2, 3.0), (3, 8, 1.0), (12, 9, 0.1)])
def test_welch(n: int, m: int, scale: float) -> None:
    """The interval is scipy's with its degrees of freedom rounded down, and holds the truth as often as it says."""
    rng = np.random.default_rng(3)
    held = []
    for _ in range(SEQUENCES):
        a, b = rng.normal(10, 1, n), rng.normal(8, scale, m)
        half_width = welch_half_width(a, b)
        held.append(abs(b.mean() - a.mean() + 2) <= half_width)
        degrees = stats.ttest_ind(b, a, equal_var=False).df
        error = np.sqrt(a.var(ddof=1) / n + b.var(ddof=1) / m)
        assert half_width == pytest.approx(stats.t.ppf(0.975, np.floor(degrees + 1e-9)) * error, rel=0.01)
        assert half_width >= 0.99 * stats.t.ppf(0.975, degrees) * error
    assert np.mean(held) >= 0.935


def test_welch_without_spread_or_values() -> None:
    assert welch_half_width(np.array([2.0, 2.0]), np.array([1.0, 1.0, 1.0])) == 0
    for a, b in ((1, 5), (5, 1), (1, 1)):
        assert np.isinf(welch_half_width(np.ones(a), np.arange(b)))
