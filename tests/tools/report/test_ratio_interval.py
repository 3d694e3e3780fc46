"""The interval of a ratio: Fieller's in another form of its formula, and how often it holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.tools.report.comparison import MetricComparison
from mmldlm.tools.report.ratio_interval import SeedStats, ratio_of_means
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
def test_the_interval_is_fiellers(x: list[float], y: list[float]) -> None:
    found = ratio_of_means(SeedStats.from_values(x), SeedStats.from_values(y))
    assert found.value == pytest.approx(np.mean(x) / np.mean(y))
    assert found.interval == pytest.approx(fieller(x, y))
    assert found.interval is not None and found.interval[0] < found.value < found.interval[1]


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(2000):
        found = ratio_of_means(
            SeedStats.from_values(rng.normal(8, 0.4, 4)), SeedStats.from_values(rng.normal(10, 0.8, 5))
        ).interval
        held += found is not None and found[0] <= 0.8 <= found[1]
    assert 0.935 <= held / 2000 <= 0.97


def test_no_interval_is_invented() -> None:
    one, several = SeedStats.from_values([2.0]), SeedStats.from_values([4.0, 4.2, 3.9])
    for found in (ratio_of_means(one, several), ratio_of_means(several, one), ratio_of_means(one, one)):
        assert found.interval is None and found.no_interval_reason == "n = 1" and found.value is not None
    assert ratio_of_means(several, SeedStats.from_values([0.0])).value is None
    doubtful = ratio_of_means(several, SeedStats.from_values([-1.0, 1.5, 0.2]))
    assert doubtful.interval is None and doubtful.no_interval_reason == "interval without bound"
    assert ratio_of_means(SeedStats.from_values([3.0, 3.0]), SeedStats.from_values([2.0, 2.0])).interval == (1.5, 1.5)


@pytest.mark.parametrize(
    ("key", "value", "baseline", "verdict"),
    [
        ("validation/total", 2.0, 3.0, "better"),
        ("validation/total", 3.0, 2.0, "worse"),
        ("speed/tokens_per_s", 2.0, 3.0, "worse"),
        ("evaluation/t2l.cosine", 0.2, -0.2, "better"),
        ("evaluation/t2l.cosine_shuffled", 0.2, 0.1, ""),
        ("validation/total", 2.0, 2.001, ""),
    ],
)
def test_a_verdict_needs_a_merit_and_an_interval_on_one_side_of_1(
    key: str, value: float, baseline: float, verdict: str
) -> None:
    ours, base = (SeedStats.from_values([mean * part for part in (0.99, 1.0, 1.01)]) for mean in (value, baseline))
    assert MetricComparison(key, base, {"ours": (ours, ratio_of_means(ours, base))}).verdict("ours") == verdict
