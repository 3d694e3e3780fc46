"""How the time of a step grows with its work, and that it does not grow with padding that would have been.

    python -m benchmarks scaling [--axes tokens length ...] [--width 256] [--depth 4] [--quick] [key.sub=value ...]

The real trainer with its defaults, on samples of random tokens. Along each axis one thing grows and all else stays:

    tokens       samples of a step, of 128 tokens each
    length       tokens of a sample, at 1,024 tokens a step
    depth        blocks
    vocabulary   tokens that there are
    positions    the most tokens that a sample may have, to which old practice pads; the samples stay
    longest      tokens of one sample of eight, at 1,024 tokens a step; old practice pads the others to it
    memory       as tokens, but the peak memory of a step, each in a process of its own

FLOPs are counted in real steps, so padding would show; a GPU's attention over unpadded samples is not among them. The
exponent is that of the power of x that fits best: least squares on logarithms, in each round of all points, which
take turns in an order drawn anew; then the median over rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.counting import flops_of
from benchmarks.measure import CONTROL, Ratio, run_rounds, trusted
from benchmarks.random_store import random_store
from benchmarks.report import chosen, parse, parser, positive, report, workplace
from benchmarks.results import say
from benchmarks.step_memory import step_memory_mib
from benchmarks.task import Task, heads_of
from benchmarks.variants import Variant, opened

LENGTH = 128  # tokens of a sample, where that is not what grows
BATCH = 8
VOCABULARY = 2048
COUNTED = 4  # steps in which FLOPs are counted
TRAINER = Variant("trainer", "")


@dataclass(frozen=True)
class Point:
    """A step of one micro-batch: samples of `lengths`, in a network of so many blocks and so on."""

    x: int  # what grows
    lengths: tuple[int, ...] = (LENGTH,) * BATCH
    depth: int | None = None
    vocabulary: int = VOCABULARY
    positions: int | None = None  # the longest sample, unless given

    @property
    def padded(self) -> int:
        """Token positions of the step, were all samples padded to the most that a sample may have."""
        return len(self.lengths) * (self.positions or max(self.lengths))

    def task(self, folder: Path, options: argparse.Namespace) -> Task:
        """The work, on a store written into `folder`; its first samples are the micro-batch."""
        store = random_store(folder, np.tile(self.lengths, 2), self.vocabulary, self.positions)
        return Task(
            store=str(store),
            width=options.width,
            depth=self.depth or options.depth,
            heads=heads_of(options.width),
            batch=len(self.lengths),
            precision=options.precision,
            settings=tuple(options.settings),
        )


def with_longest(longest: int) -> tuple[int, ...]:
    """Eight samples of 1,024 tokens together, one of them of `longest`."""
    rest = BATCH * LENGTH - longest
    return (*(rest // (BATCH - 1) + (number < rest % (BATCH - 1)) for number in range(BATCH - 1)), longest)


AXES: dict[str, Callable[[], list[Point]]] = {
    "tokens": lambda: [Point(LENGTH * batch, (LENGTH,) * batch) for batch in (1, 2, 4, 8, 16)],
    "length": lambda: [Point(each, (each,) * (1024 // each)) for each in (64, 128, 256, 512, 1024)],
    "depth": lambda: [Point(depth, depth=depth) for depth in (2, 4, 8)],
    "vocabulary": lambda: [Point(size, vocabulary=size) for size in (1024, 2048, 4096, 8192, 16384, 32768)],
    "positions": lambda: [Point(most, positions=most) for most in (128, 256, 512, 1024)],
    "longest": lambda: [Point(longest, with_longest(longest)) for longest in (128, 256, 512)],
    "memory": lambda: [Point(LENGTH * batch, (LENGTH,) * batch) for batch in (8, 16, 32, 64)],
}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """b of the y = a x^b that fits best: least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@dataclass(frozen=True)
class Times:
    """Of each point, in their order."""

    seconds: list[list[float]]  # of a step, in each round
    control: Ratio  # the first point against itself
    flops: list[float]  # of a step


def times(points: list[Point], options: argparse.Namespace, folder: Path) -> Times:
    with ExitStack() as stack:
        runs = {}
        for point in points:
            task, rows = point.task(folder / f"store-{point.x}", options), [np.arange(len(point.lengths))]
            runs[str(point.x)] = stack.enter_context(opened(TRAINER, task, rows, folder / str(point.x)))
        for run in runs.values():
            for number in range(2):
                run.step(number)
        gc.collect()
        gc.freeze()
        found = run_rounds(runs, options.rounds, options.steps, first=2, patience=1).seconds
        gc.unfreeze()
        # What is masked is drawn anew in each step: the same steps for all.
        flops = [flops_of(run, range(COUNTED)) for run in runs.values()]
    seconds = [[each / options.steps for each in found[name]] for name in runs]
    return Times(seconds, Ratio.of(found[CONTROL], found[str(points[0].x)]), flops)


def measure(axis: str, options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of each point, and one of the axis."""
    points = AXES[axis]()[: options.points]
    x = [point.x for point in points]
    what: dict[str, Any] = {"axis": axis, "from": x[0], "to": x[-1]}
    if axis == "memory":
        found = [step_memory_mib("trainer", point.task(folder / str(point.x), options))[1] for point in points]
        unit, shown = "MiB", found
        counted: list[dict[str, Any]] = [{}] * len(points)
        fitted = {"exponent": exponent(x, found), **dict.fromkeys(("95 %", "of FLOPs", CONTROL, "trusted"), "")}
    else:
        timed = times(points, options, folder)
        unit, shown = "ms", [1000 * median(each) for each in timed.seconds]
        counted = [{"GFLOP": each / 1e9} for each in timed.flops]
        of_rounds = Ratio.over([exponent(x, each) for each in zip(*timed.seconds, strict=True)])
        fitted = {
            "exponent": of_rounds.median,
            "95 %": f"{of_rounds.low:.3f} to {of_rounds.high:.3f}",
            "of FLOPs": exponent(x, timed.flops),
            CONTROL: timed.control.median,
            "trusted": trusted(timed.control),
            "seconds": timed.seconds,
        }
    rows = [
        {
            axis: point.x,
            "samples": len(point.lengths),
            "real tokens": sum(point.lengths),
            "padded": point.padded,
            **also,
            unit: value,
            "of the first": value / shown[0],
        }
        for point, value, also in zip(points, shown, counted, strict=True)
    ]
    return rows, what | fitted


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scaling", "How time and memory of a step grow with its work.")
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    options.add_argument("--axes", nargs="+", metavar="AXIS", help=f"of {', '.join(AXES)} (all)")
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options.add_argument("--steps", type=positive, default=2, help="of a round (%(default)s)")
    options.add_argument("--points", type=positive, help="only so many of each axis, from the smallest")
    in_short = [axis for axis in AXES if axis != "memory"]  # which takes two processes
    given = parse(options, argv, axes=in_short, width=64, depth=2, steps=1, points=2, rounds=2)
    tables: dict[str, list[dict[str, Any]]] = {"Exponents": []}
    with workplace(given) as folder:
        for axis in chosen("--axes", given.axes, list(AXES)):
            say(axis)
            rows, fitted = measure(axis, given, folder / axis)
            tables[axis] = rows
            tables["Exponents"].append(fitted)
    report(given, "scaling", tables)
    return 0
