"""The paired comparison, and the shapes of what is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.counting import covered
from benchmarks.common.measure import CONTROL, Comparison, LocalRun, Probe, Ratio, Steadiness, compare, open_runs
from benchmarks.common.task import largest_batch, lengths_of, typical_batches
from benchmarks.scaling import AXES, exponent
from mmldlm.data.sampler import SampleOrder

pytestmark = pytest.mark.quick


class Recorder:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def step(self, number: int) -> None:
        self.numbers.append(number)


@pytest.mark.parametrize(("patience", "again"), [(0.0, []), (0.3, [11]), (1.0, [11, 14, 14])])
def test_disturbed_turns_are_repeated(patience: float, again: list[int]) -> None:
    one, two, calls = Recorder(), Recorder(), count()

    def probe() -> float:
        """Called four times a turn, before its first step and after each: half the rate at 11 once, at 14 twice."""
        return 50.0 if next(calls) // 4 in slow else 100.0

    slow = {1, 4, 7}  # turns, counted from 0: 10 to 15, then 11, 14 and 14 once more
    runs = {"one": LocalRun(one), "two": LocalRun(two)}
    comparison = compare(runs, rounds=3, steps=2, first=10, patience=patience, probe=probe)
    assert two.numbers == [*range(10, 16), *again]
    assert one.numbers == sorted([*range(10, 16)] * 2) + [number for number in again for _ in range(2)]
    assert {name: len(rounds) for name, rounds in comparison.seconds.items()} == {"one": 3, "two": 3, CONTROL: 3}
    steady = comparison.steadiness
    assert (steady.turns, steady.repeated, steady.disturbed) == (6, len(again), 2 - len(set(again)))
    assert steady.slowest == (1.0 if patience == 1 else 0.5)


class Fixed:
    def __init__(self, seconds: float):
        self.seconds, self.process = seconds, os.getpid()

    def step(self, number: int) -> float:
        return self.seconds * number


@contextmanager
def fixed(seconds: float) -> Iterator[Fixed]:
    yield Fixed(seconds)


@contextmanager
def broken() -> Iterator[Fixed]:
    raise ValueError("cannot be opened")
    yield


def process_of(run: Fixed) -> int:
    return run.process


def test_processes_are_compared() -> None:
    with open_runs({"slow": partial(fixed, 3.0), "fast": partial(fixed, 1.5)}) as runs:
        assert len({os.getpid(), *(run.call(process_of) for run in runs.values())}) == 3
        comparison = compare(runs, rounds=2, steps=2, first=1)
    assert comparison.seconds == {"slow": [9.0, 21.0], "fast": [4.5, 10.5], CONTROL: [9.0, 21.0]}
    assert comparison.speed("fast") == Ratio(2, 2, 2) and comparison.trusted
    with pytest.raises(ValueError, match="cannot be opened"), open_runs({"broken": broken}):
        pass


def test_ratios_and_their_interval() -> None:
    ratio = Ratio.of([2.0, 2.2, 1.8, 2.0, 40.0], [1.0] * 5)
    assert ratio.median == 2.0 and 1.8 <= ratio.low <= ratio.high <= 40.0
    for control, trusted in ((1.04, True), (1.07, False)):
        comparison = Comparison({"base": [1.0] * 3, CONTROL: [control] * 3}, Steadiness(3, 0, 0, 1))
        assert comparison.trusted is trusted
    assert all(1e8 < Probe()() < 1e13 for _ in range(3))


def test_union_of_intervals() -> None:
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 4
    assert covered([]) == 0


def test_micro_batches_have_the_lengths_of_an_epoch() -> None:
    lengths = lengths_of("documents", 4096)
    split: Any = SimpleNamespace(lengths=lengths)
    order = SampleOrder(lengths, seed=0)
    rows = typical_batches(order, split, 8, 8)
    assert np.mean([lengths[samples].mean() for samples in rows]) == pytest.approx(lengths.mean(), rel=0.05)
    assert lengths[largest_batch(order, split, 8)].sum() >= max(lengths[samples].sum() for samples in rows)


def test_scaling_exponents() -> None:
    x = [1, 2, 4, 8]
    assert exponent(x, [3 * value**2 for value in x]) == pytest.approx(2)
    for axis in ("length", "longest", "depth", "vocabulary", "positions"):  # along which the tokens of a step stay
        points = AXES[axis]()
        assert len({sum(point.lengths) for point in points}) == 1 and len({point.x for point in points}) == len(points)
