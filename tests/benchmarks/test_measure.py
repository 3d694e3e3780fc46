"""The paired comparison finds a slower run, and does not trust a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from benchmarks.common.measure import CONTROL, Comparison, Ratio, Steadiness, compare, open_runs

pytestmark = pytest.mark.quick


class Fixed:
    def __init__(self, seconds: float):
        self.seconds = seconds

    def step(self, number: int) -> float:
        return self.seconds * number


@contextmanager
def fixed(seconds: float) -> Iterator[Fixed]:
    yield Fixed(seconds)


def test_paired_comparison() -> None:
    with open_runs({"slow": partial(fixed, 3.0), "fast": partial(fixed, 1.5)}) as runs:
        comparison = compare(runs, rounds=2, steps=2, first=1)
    assert comparison.seconds == {"slow": [9.0, 21.0], "fast": [4.5, 10.5], CONTROL: [9.0, 21.0]}
    assert comparison.speed("fast") == Ratio(2, 2, 2) and comparison.trusted
    assert not Comparison({"base": [1.0] * 3, CONTROL: [1.07] * 3}, Steadiness(3, 0, 0, 1)).trusted
