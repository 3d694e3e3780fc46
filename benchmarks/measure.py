"""Time of variants against each other on a machine that others may use, too.

One thread and its CPU time, where there is no GPU; otherwise seconds by the clock, between synchronizations. Variants
take turns after each step, in an order drawn anew, so that what neighbors do to the machine meets them all. Beside
each step a matrix product, the same for all, tells what the machine gives at that moment; a turn in which that was less
than in the best one is taken again, as often as patience allows, because variants of other shares of products are not
slowed alike. In each round every variant goes through the same micro-batches; what is compared is the ratio of two
variants' times in the same round. The first variant is measured twice in each round: where it differs from itself, the
machine was too busy for a verdict.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import fmean
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
STEADY = 0.9  # of the best rate of the machine: below, a turn is taken again
TRUSTED = 0.05  # the largest difference of a variant from itself with which there is a verdict


class Steps(Protocol):
    """What is measured in rounds."""

    def step(self, number: int) -> object:
        """A float is taken for the seconds of the step."""


def clock() -> float:
    """Seconds: of this thread's CPU where it does all work, else by the clock, with the GPU's work done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Probe:
    """What one thread of this machine gives at the moment, in FLOP/s of a matrix product. Always 1 on a GPU."""

    SIDE, TIMES = 512, 8

    def __init__(self) -> None:
        self._on_cpu = not torch.cuda.is_available()
        self._factors = torch.ones(2, self.SIDE, self.SIDE) if self._on_cpu else torch.empty(0)

    def __call__(self) -> float:
        if not self._on_cpu:
            return 1.0
        began = clock()
        for _ in range(self.TIMES):
            self._factors[0] @ self._factors[1]
        return 2 * self.SIDE**3 * self.TIMES / (clock() - began)


@dataclass(frozen=True)
class Turn:
    """One step of each variant."""

    rate: float  # the mean of what the probe told beside them
    seconds: dict[str, float]


@dataclass(frozen=True)
class Steadiness:
    """Of the machine, in the turns that count."""

    turns: int
    repeated: int  # turns that were taken beyond these
    disturbed: int  # of the turns that count, those that stayed below STEADY
    slowest: float  # the lowest rate of a turn that counts, against the best of all


@dataclass(frozen=True)
class Rounds:
    seconds: dict[str, list[float]]  # of each round, by variant and of the first one's `CONTROL`
    steadiness: Steadiness


def timed(run: Steps, number: int) -> float:
    """Seconds of a step."""
    began = clock()
    told = run.step(number)
    return told if isinstance(told, float) else clock() - began


def run_rounds(
    runs: Mapping[str, Steps],
    rounds: int,
    steps: int,
    first: int,
    seed: int = 0,
    patience: float = 0.0,
    probe: Callable[[], float] | None = None,
) -> Rounds:
    """Time of `steps` steps in each round.

    Steps are numbered from `first`: the same numbers for all, so the same samples and noise. `patience` bounds the
    turns that are taken again, as a multiple of rounds * steps.
    """
    order = [*runs, CONTROL]
    runs = {**runs, CONTROL: next(iter(runs.values()))}
    draw, probe = random.Random(seed), probe or Probe()
    numbers = range(first, first + rounds * steps)
    found: dict[int, Turn] = {}
    missing, taken, best = list(numbers), 0, 0.0
    most = int((1 + patience) * len(numbers))
    while missing and taken < most:
        for number in missing[: most - taken]:
            draw.shuffle(order)
            rates, seconds = [probe()], dict.fromkeys(order, 0.0)
            for name in order:
                seconds[name] = timed(runs[name], number)
                rates.append(probe())
            turn = Turn(sum(rates) / len(rates), seconds)
            best, taken = max(best, turn.rate), taken + 1
            if number not in found or found[number].rate < turn.rate:
                found[number] = turn
        missing = [number for number in numbers if found[number].rate < STEADY * best]
    of_rounds = [[found[number] for number in numbers[at * steps : (at + 1) * steps]] for at in range(rounds)]
    return Rounds(
        {name: [sum(turn.seconds[name] for turn in turns) for turns in of_rounds] for name in order},
        Steadiness(
            turns=len(numbers),
            repeated=taken - len(numbers),
            disturbed=len(missing),
            slowest=min(turn.rate for turn in found.values()) / best,
        ),
    )


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
    """Mean seconds of a step's parts. They are timed apart from the rounds: on a GPU each part is waited for."""
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
    return {part: fmean(values) for part, values in found.items()}
