"""Analysis of paired runs, on curves whose differences are known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.paired import LOSSES, compare_changed, exchanged_decisions

pytestmark = pytest.mark.quick


def test_pairs_that_share_their_noise() -> None:
    draw = np.random.default_rng(0)
    arms = []
    for _ in range(20):
        shared = 5 + 0.3 * draw.standard_normal(100)
        a, b = shared, shared * 1.005 + 0.02 * draw.standard_normal(100)
        arms.append((dict.fromkeys(LOSSES, a), dict.fromkeys(LOSSES, b)))
    records, mean, tail = compare_changed(arms, LOSSES[0])
    assert mean["difference %"] == pytest.approx(0.5, abs=0.1) and mean["variance, paired / unpaired"] < 0.01
    assert records["variance, paired / unpaired"] < 0.01
    assert records["decided in 100 steps, paired"] == 1 and records["decided in 100 steps, unpaired"] < 0.2
    assert (
        3
        <= mean["pairs for 0.5 %, paired"]
        < 10
        < mean["pairs for 0.5 %, unpaired"]
        < tail["pairs for 0.5 %, unpaired"]
    )
    assert exchanged_decisions(arms, LOSSES[0], 1, 100) <= 0.05
