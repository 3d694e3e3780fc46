"""Time of variants against each other on a machine that others may use, too.

One thread and its CPU time, where there is no GPU; otherwise seconds by the clock, between synchronisations. Variants
take turns after each step, in an order drawn anew, so that what neighbours do to the machine meets them all. In each
round every variant goes through the same micro-batches; what is compared is the ratio of two variants' times in the
same round. The first variant is measured twice in each round: where it differs from itself, the machine was too busy
for a verdict.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
import torch

from benchmarks.variants import Open

PARTS = {  # by the method of a run
    "corrupt": "corrupt, transfer",
    "forward": "forward",
    "backward": "backward",
    "update": "clip, optimizer",
    "finish_step": "logging",
}
WAIT, OTHER = "data wait", "other"
CONTROL = "control"
TRUSTED = 0.05  # the largest difference of a variant from itself with which there is a verdict


class Steps(Protocol):
    """What is measured in rounds."""

    def step(self, number: int) -> object: ...


def clock() -> float:
    """Seconds: of this thread's CPU where it does all work, else by the clock, with the GPU's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def run_rounds(runs: Mapping[str, Steps], rounds: int, steps: int, first: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of `steps` steps in each round, by variant and of the first one's `CONTROL`.

    Steps are numbered from `first`: the same numbers for all, so the same samples and noise.
    """
    order = [*runs, CONTROL]
    runs = {**runs, CONTROL: next(iter(runs.values()))}
    draw, seconds = random.Random(seed), {name: [0.0] * rounds for name in runs}
    for number in range(rounds):
        for step in range(first + number * steps, first + (number + 1) * steps):
            draw.shuffle(order)
            for name in order:
                began = clock()
                runs[name].step(step)
                seconds[name][number] += clock() - began
    return seconds


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> Ratio:
        """Of above / below, round by round."""
        return cls.over(np.array(above) / np.array(below))

    @classmethod
    def over(cls, values: Sequence[float] | np.ndarray) -> Ratio:
        """Of one value a round."""
        draws = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        return cls(float(np.median(values)), float(low), float(high))


def trusted(control: Ratio) -> bool:
    return abs(control.median - 1) <= TRUSTED


@contextmanager
def watched(run: Open, around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """`around(part)` surrounds each of the run's `PARTS`."""

    def wrap(method: Callable, part: str) -> Callable:
        def wrapped(*arguments: object) -> object:
            with around(part):
                return method(*arguments)

        return wrapped

    for name, part in PARTS.items():
        setattr(run.verbs, name, wrap(getattr(run.verbs, name), part))
    run.feed.batch = wrap(run.feed.batch, WAIT)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in PARTS:
            delattr(run.verbs, name)
        del run.feed.batch


def parts_of(run: Open, steps: range) -> dict[str, float]:
    """Median seconds of a step's parts. They are timed apart from the rounds: on a GPU each part is waited for."""
    found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        began = clock()
        yield
        step[part] += clock() - began

    with watched(run, timed):
        for number in steps:
            step: dict[str, float] = defaultdict(float)
            began = clock()
            run.step(number)
            whole = clock() - began
            for part in (WAIT, *PARTS.values()):
                found[part].append(step[part])
            found[OTHER].append(whole - sum(step.values()))
    return {part: median(values) for part, values in found.items()}
