"""Which differences between runs are significant."""

from __future__ import annotations

import pytest

from mmldlm.tools.report.comparison import MetricComparison
from mmldlm.utils.ratio import SeedStats, ratio_of_means

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("key", "value", "baseline", "significance"),
    [
        ("validation/total", 2.0, 3.0, "better"),
        ("validation/total", 3.0, 2.0, "worse"),
        ("speed/tokens_per_s", 2.0, 3.0, "worse"),
        ("evaluation/t2l.cosine", 0.2, -0.2, "better"),
        ("evaluation/t2l.cosine_shuffled", 0.2, 0.1, ""),
        ("validation/total", 2.0, 2.001, ""),
    ],
)
def test_significance(key: str, value: float, baseline: float, significance: str) -> None:
    ours, base = (SeedStats.from_values([mean * part for part in (0.99, 1.0, 1.01)]) for mean in (value, baseline))
    comparison = MetricComparison(key, base, {"ours": (ours, ratio_of_means(ours, base))})
    assert comparison.significance("ours") == significance
