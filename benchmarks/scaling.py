"""How the time of a step grows with its work, and that it does not grow with padding.

    python -m benchmarks scaling [--axes tokens length ...] [--width 256] [--depth 4] [--quick] [key.sub=value ...]

Measures the trainer with its defaults, on samples of random tokens. Along each axis one quantity grows:

    tokens       samples of a step, of 128 tokens each
    length       tokens of a sample, at 1,024 tokens a step
    depth        blocks
    vocabulary   tokens of the vocabulary
    positions    the maximum length of a sample, to which the reference pads; the samples stay the same
    longest      tokens of one sample of eight, at 1,024 tokens a step; the reference pads the others to it
    memory       like tokens, with the peak memory of a step, each in a process of its own

FLOPs are counted in real steps, so padding would show; a GPU's attention over unpadded samples is not included. The
exponent is that of the best power law: least squares on the logarithms of all points in each round, then the median
over rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.counting import flops_of
from benchmarks.common.measure import CONTROL, Ratio, compare, open_runs, warm_up
from benchmarks.common.report import add_settings, parse, parser, positive, print_status, report, select_names, work_dir
from benchmarks.common.task import Task, heads_of, random_store
from benchmarks.common.variants import Variant, opened
from benchmarks.memory import step_memory_mib

LENGTH = 128  # tokens of a sample, unless these grow
BATCH = 8
VOCABULARY = 2048
COUNTED = 4  # steps in which FLOPs are counted
TRAINER = Variant("trainer", "")


@dataclass(frozen=True)
class Point:
    """A step of one micro-batch: samples of `lengths`, in a network of `depth` blocks."""

    x: int  # what grows
    lengths: tuple[int, ...] = (LENGTH,) * BATCH
    depth: int | None = None
    vocabulary: int = VOCABULARY
    positions: int | None = None  # the longest sample, unless given

    @property
    def padded(self) -> int:
        """Token positions of the step if all samples were padded to the maximum length."""
        return len(self.lengths) * (self.positions or max(self.lengths))

    def task(self, folder: Path, options: argparse.Namespace) -> Task:
        """Return the task, on a store written into `folder` whose first samples are the micro-batch."""
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
    """Return the lengths of eight samples with 1,024 tokens in total, the last of them `longest`."""
    rest = BATCH * LENGTH - longest
    return (*(rest // (BATCH - 1) + (number < rest % (BATCH - 1)) for number in range(BATCH - 1)), longest)


AXES: dict[str, Callable[[], list[Point]]] = {
    "tokens": lambda: [Point(LENGTH * batch, (LENGTH,) * batch) for batch in (1, 2, 4, 8, 16)],
    "length": lambda: [Point(length, (length,) * (1024 // length)) for length in (64, 128, 256, 512, 1024)],
    "depth": lambda: [Point(depth, depth=depth) for depth in (2, 4, 8)],
    "vocabulary": lambda: [Point(size, vocabulary=size) for size in (1024, 2048, 4096, 8192, 16384, 32768)],
    "positions": lambda: [Point(length, positions=length) for length in (128, 256, 512, 1024)],
    "longest": lambda: [Point(longest, with_longest(longest)) for longest in (128, 256, 512)],
    "memory": lambda: [Point(LENGTH * batch, (LENGTH,) * batch) for batch in (8, 16, 32, 64)],
}


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return b of the best fit y = a x^b, by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@dataclass(frozen=True)
class Times:
    """Measurements of all points, in their order."""

    seconds: list[list[float]]  # of a step, in each round
    control: float  # the first point against itself
    trusted: bool
    flops: list[float]  # of a step


def times(points: list[Point], options: argparse.Namespace, folder: Path) -> Times:
    openers = {}
    for point in points:
        task, rows = point.task(folder / f"store-{point.x}", options), [np.arange(len(point.lengths))]
        openers[str(point.x)] = partial(opened, TRAINER, task, rows, folder / str(point.x))
    with open_runs(openers) as runs:
        warm_up(runs, 2)
        comparison = compare(runs, options.rounds, options.steps, first=2, patience=1)
        # Each step draws another mask: the same steps for all.
        flops = [run.call(flops_of, range(COUNTED)) for run in runs.values()]
    seconds = [[total / options.steps for total in comparison.seconds[name]] for name in openers]
    return Times(seconds, comparison.control.median, comparison.trusted, flops)


def measure(axis: str, options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row per point, and one for the axis."""
    points = AXES[axis]()[: options.points]
    x = [point.x for point in points]
    what: dict[str, Any] = {"axis": axis, "from": x[0], "to": x[-1]}
    if axis == "memory":
        unit = "MiB"
        values = [step_memory_mib("trainer", point.task(folder / str(point.x), options))[1] for point in points]
        counted: list[dict[str, Any]] = [{}] * len(points)
        fitted = {"exponent": exponent(x, values), **dict.fromkeys(("95 %", "of FLOPs", CONTROL, "trusted"), "")}
    else:
        timed = times(points, options, folder)
        unit, values = "ms", [1000 * median(seconds) for seconds in timed.seconds]
        counted = [{"GFLOP": flops / 1e9} for flops in timed.flops]
        of_rounds = Ratio.over([exponent(x, seconds) for seconds in zip(*timed.seconds, strict=True)])
        fitted = {
            "exponent": of_rounds.median,
            "95 %": str(of_rounds),
            "of FLOPs": exponent(x, timed.flops),
            CONTROL: timed.control,
            "trusted": timed.trusted,
            "seconds": timed.seconds,
        }
    rows = [
        {
            axis: point.x,
            "samples": len(point.lengths),
            "real tokens": sum(point.lengths),
            "padded": point.padded,
            **counts,
            unit: value,
            "of the first": value / values[0],
        }
        for point, value, counts in zip(points, values, counted, strict=True)
    ]
    return rows, what | fitted


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scaling", "How time and memory of a step grow with its work.")
    add_settings(options)
    options.add_argument("--axes", nargs="+", metavar="AXIS", help=f"of {', '.join(AXES)} (all)")
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options.add_argument("--steps", type=positive, default=2, help="of a round (%(default)s)")
    options.add_argument("--points", type=positive, help="points of each axis, from the smallest (all)")
    in_short = [axis for axis in AXES if axis != "memory"]  # which takes two processes
    given = parse(options, argv, axes=in_short, width=64, depth=2, steps=1, points=2, rounds=2)
    tables: dict[str, list[dict[str, Any]]] = {"Exponents": []}
    with work_dir(given) as folder:
        for axis in select_names("--axes", given.axes, list(AXES)):
            print_status(axis)
            rows, fitted = measure(axis, given, folder / axis)
            tables[axis] = rows
            tables["Exponents"].append(fitted)
    report(given, "scaling", tables)
    return 0
