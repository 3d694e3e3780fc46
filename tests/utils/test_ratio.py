"""The interval of a ratio: Fieller's in another form of its formula, and how often it holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.utils.ratio import SeedStats, ratio_of_means
from tests.helpers.report_numbers import fieller

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([5.1, 5.3, 4.9], [6.0, 6.2, 6.1]),
        ([1.0, 1.4], [1.1, 1.2, 1.0, 1.3]),
        ([-0.5, -0.4, -0.2], [2.0, 2.4, 2.1]),
        ([3.0, 3.2], [-4.0, -4.1]),
    ],
)
def test_interval_is_fiellers(x: list[float], y: list[float]) -> None:
    result = ratio_of_means(SeedStats.from_values(x), SeedStats.from_values(y))
    assert result.value == pytest.approx(np.mean(x) / np.mean(y))
    assert result.interval == pytest.approx(fieller(x, y))
    assert result.interval[0] < result.value < result.interval[1]


def test_interval_has_its_coverage() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(2000):
        result = ratio_of_means(
            SeedStats.from_values(rng.normal(8, 0.4, 4)), SeedStats.from_values(rng.normal(10, 0.8, 5))
        ).interval
        held += result[0] <= 0.8 <= result[1]
    assert 0.935 <= held / 2000 <= 0.97


def test_no_interval_without_enough_data() -> None:
    one, several = SeedStats.from_values([2.0]), SeedStats.from_values([4.0, 4.2, 3.9])
    for result in (ratio_of_means(one, several), ratio_of_means(several, one), ratio_of_means(one, one)):
        assert result.no_interval_reason == "n = 1" and np.isnan(result.interval).all() and result.value > 0
    assert np.isnan(ratio_of_means(several, SeedStats.from_values([0.0])).value)
    doubtful = ratio_of_means(several, SeedStats.from_values([-1.0, 1.5, 0.2]))
    assert np.isnan(doubtful.interval).all() and doubtful.no_interval_reason == "interval without bound"
    assert ratio_of_means(SeedStats.from_values([3.0, 3.0]), SeedStats.from_values([2.0, 2.0])).interval == (1.5, 1.5)


def test_only_zeros_over_a_baseline_that_varies() -> None:
    zeros, baseline = SeedStats.from_values([0.0, 0.0, 0.0]), SeedStats.from_values([0.5, 0.6, 0.7])
    assert ratio_of_means(zeros, baseline).interval == (0.0, 0.0)
