"""Paired comparison: runs step in turns, and we compare the times of two runs in the same round.

- On a CPU each run has its own process. So the allocator's heap is as this run leaves it, and a setting such as
  `memory.keep_freed` does not affect other runs. All processes share one core, because the cores of a shared machine
  differ. On a GPU all runs share this process and one caching allocator, since memory would not suffice otherwise.
- Without a GPU, time is the CPU time of one thread. With a GPU, it is wall time between synchronizations.
- After each step the next run takes its turn, in a new random order each time, so that other work on the machine
  affects all runs alike. Next to each step, a matrix product measures the current speed of the machine. A turn at less
  than `STEADY` of the best speed is repeated, within `patience`.
- The first run is measured twice in each round. If it differs from itself by more than `TRUSTED`, the machine was too
  busy for a conclusion.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import numpy as np
import torch

CONTROL = "control"
STEADY = 0.9  # share of the machine's best rate
TRUSTED = 0.05  # largest deviation of the first run from itself
PROBE_SIDE, PROBE_PRODUCTS = 512, 8

T = TypeVar("T")


class Run(Protocol):
    """A run to compare with others."""

    def step(self, number: int) -> object:
        """Take the step with this number. If a float is returned, it counts as the step's seconds."""


Opener = Callable[[], AbstractContextManager[Run]]


def clock() -> float:
    """Return seconds: CPU time if one thread does all the work, otherwise wall time after the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(run: Run, number: int) -> float:
    """Take a step and return its seconds."""
    start = clock()
    returned = run.step(number)
    return returned if isinstance(returned, float) else clock() - start


# --- processes ------------------------------------------------------------------------------------


class LocalRun:
    """A run in this process."""

    def __init__(self, run: Run):
        self._run = run

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(run, *arguments)`."""
        return function(self._run, *arguments)


class ProcessRun:
    """A run in its own process, which receives functions and openers pickled. Use it as a context manager."""

    def __init__(self, name: str, opener: Opener):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.common.variants"])
        self._name = name
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, opener, torch.get_num_threads()), daemon=True)
        self._process.start()
        child_pipe.close()

    def __enter__(self) -> ProcessRun:
        self._receive()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()  # which ends the process
        self._process.join(10)
        self._process.kill()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(run, *arguments)`, called in the run's process."""
        self._pipe.send((function, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            result, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name}: its process has exited; out of memory?") from None
        if error is not None:
            raise error
        return result


def _serve(pipe: Connection, opener: Opener, threads: int) -> None:
    torch.set_num_threads(threads)
    with ExitStack() as stack:
        try:
            run = stack.enter_context(opener())
        except Exception as error:
            pipe.send((None, error))
            return
        pipe.send((None, None))
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((function(run, *arguments), None))
            except Exception as error:
                pipe.send((None, error))


@contextmanager
def open_runs(openers: Mapping[str, Opener]) -> Iterator[dict[str, LocalRun | ProcessRun]]:
    """Open all runs: on a CPU each in its own process, on a GPU all in this one."""
    with ExitStack() as stack:
        if torch.cuda.is_available():
            stack.callback(gc.unfreeze)
            yield {name: LocalRun(stack.enter_context(opener())) for name, opener in openers.items()}
            return
        if torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {max(cores)})
            stack.callback(os.sched_setaffinity, 0, cores)
        yield {name: stack.enter_context(ProcessRun(name, opener)) for name, opener in openers.items()}


def warm_up(runs: Mapping[str, LocalRun | ProcessRun], steps: int) -> None:
    """Take `steps` steps, then freeze all live objects, because garbage collection would hit runs at random."""
    for run in runs.values():
        for number in range(steps):
            run.call(timed, number)
        run.call(_freeze)


def _freeze(run: Run) -> None:
    gc.collect()
    gc.freeze()


def in_new_process(environment: Mapping[str, str], function: Callable[..., T], *arguments: Any) -> T:
    """Call `function(*arguments)` in a fresh interpreter with `environment`, and return the result.

    Raises:
        BrokenProcessPool: The process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


# --- rounds ---------------------------------------------------------------------------------------


class Probe:
    """Measures the current speed of one thread of this machine, in FLOP/s of a matrix product. Always 1 on a GPU."""

    def __init__(self) -> None:
        self._on_cpu = not torch.cuda.is_available()
        self._factors = torch.ones(2, PROBE_SIDE, PROBE_SIDE) if self._on_cpu else torch.empty(0)

    def __call__(self) -> float:
        if not self._on_cpu:
            return 1.0
        start = clock()
        for _ in range(PROBE_PRODUCTS):
            self._factors[0] @ self._factors[1]
        return 2 * PROBE_SIDE**3 * PROBE_PRODUCTS / (clock() - start)


@dataclass(frozen=True)
class Ratio:
    """Median over rounds, with the bounds of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Summarize the ratios of two lists with one value per round."""
        return cls.over(np.array(numerators) / np.array(denominators))

    @classmethod
    def over(cls, values: Sequence[float] | np.ndarray) -> Ratio:
        """Summarize one value per round."""
        draws = np.random.default_rng(0).choice(np.asarray(values), (2000, len(values)))
        low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
        return cls(float(np.median(values)), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.low:.3f} to {self.high:.3f}"


@dataclass(frozen=True)
class Steadiness:
    """Steadiness of the machine in the turns that count."""

    turns: int
    repeated: int  # additional turns
    disturbed: int  # counted turns that stayed below STEADY
    slowest: float  # lowest rate of a counted turn, relative to the best rate


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, by run, and for `CONTROL`: the first run, measured again."""

    seconds: dict[str, list[float]]
    steadiness: Steadiness

    @property
    def base(self) -> str:
        """The first run. The others are compared with it."""
        return next(iter(self.seconds))

    def speed(self, name: str) -> Ratio:
        """Return the speed of `name` as a multiple of the first run's speed."""
        return Ratio.of(self.seconds[self.base], self.seconds[name])

    @property
    def control(self) -> Ratio:
        """The first run against itself."""
        return self.speed(CONTROL)

    @property
    def trusted(self) -> bool:
        """Return whether the first run agrees with itself."""
        return abs(self.control.median - 1) <= TRUSTED


@dataclass(frozen=True)
class _Turn:
    """One step of each run, and the mean rate of the probe next to them."""

    rate: float
    seconds: dict[str, float]


def compare(
    runs: Mapping[str, LocalRun | ProcessRun],
    rounds: int,
    steps: int,
    first: int,
    seed: int = 0,
    patience: float = 0.0,
    probe: Callable[[], float] | None = None,
) -> Comparison:
    """Time `steps` steps of each run in each round, in turns.

    Args:
        runs: The first is the base of the comparison.
        rounds: Number of measurements.
        steps: Steps of a round.
        first: Number of the first step. All runs take steps of the same numbers, so they have equal samples and noise.
        seed: Seed for the order of turns.
        patience: Limit of repeated turns, as a multiple of rounds * steps.
        probe: Returns the machine's rate. By default it is measured.
    """
    base = next(iter(runs))
    order = [*runs, CONTROL]
    draw, probe = random.Random(seed), probe or Probe()
    numbers = range(first, first + rounds * steps)
    turns: dict[int, _Turn] = {}
    missing, taken, best = list(numbers), 0, 0.0
    max_turns = int((1 + patience) * len(numbers))
    while missing and taken < max_turns:
        for number in missing[: max_turns - taken]:
            draw.shuffle(order)
            rates, seconds = [probe()], {}
            for name in order:
                seconds[name] = runs[base if name == CONTROL else name].call(timed, number)
                rates.append(probe())
            turn = _Turn(sum(rates) / len(rates), seconds)
            best, taken = max(best, turn.rate), taken + 1
            if number not in turns or turns[number].rate < turn.rate:
                turns[number] = turn
        missing = [number for number in numbers if turns[number].rate < STEADY * best]
    per_round = [[turns[number] for number in numbers[at * steps : (at + 1) * steps]] for at in range(rounds)]
    return Comparison(
        {name: [sum(turn.seconds[name] for turn in one_round) for one_round in per_round] for name in [*runs, CONTROL]},
        Steadiness(
            turns=len(numbers),
            repeated=taken - len(numbers),
            disturbed=len(missing),
            slowest=min(turn.rate for turn in turns.values()) / best,
        ),
    )
