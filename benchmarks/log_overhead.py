"""What logging costs: records, TensorBoard, meter and counting; figures and texts; and the wait for data.

    python -m benchmarks log_overhead [--batch 64] [--width 256] [--samples sentences] [--quick] [key.sub=value ...]

The real trainer with the shape, the intervals and the sampling of `configs/python-docs.yaml`. A step's bookkeeping is
measured in two ways:

- the trainer against the same trainer without records and TensorBoard, over the same samples with the same noise, in
  turns. Differences below the interval cannot be seen this way.
- each call of the bookkeeping by itself, while the trainer reads from its own loader. "other threads" is what the
  process used besides the thread that trains: TensorBoard writes its files from a thread of its own.

The cost does not depend on the network's size, and that run's half a second is among the shortest steps.

What a validation leaves in TensorBoard is measured as well: what is written, and the passes of the network behind the
figures and the texts. The total is over that run, each part as often as it occurs there, as a share of its steps. The
losses of a validation are not included: they are what a validation is for.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.measure import Ratio, clock, compare, open_runs, warm_up
from benchmarks.common.report import ROOT, add_settings, parse, parser, positive, print_status, report, work_dir
from benchmarks.common.task import Task, heads_of, lengths_of, random_store, typical_batches
from benchmarks.common.variants import Variant, opened, training_of
from mmldlm.config import RunConfig, load_config
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.evaluation.validate import validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figures_due, text_samples
from mmldlm.settings.fields import dump
from mmldlm.train import train_step

MEASURED = ROOT / "configs" / "python-docs.yaml"
AS_THERE = ("mode", "sampling")  # its settings besides shape and intervals
CADENCE = 10  # steps from record to record: the default of log.every
GOAL = 0.01  # of a step, for logging, and for the data
REPEATS = 3  # of a validation; medians count
STEP_S = 0.5  # the step that the goal is of
SAMPLES = 4096  # of the store
SILENT = Variant("without records", "", settings=("log={every: 1000000, tensorboard: false}",))
AS_IT_IS = Variant("as it is", "")
FINISH, METER = "end of the step, with a record every tenth", "meter"
DATA, OTHERS = "wait for data", "other threads"
ALL, WHOLE = "all bookkeeping", "whole step"
BOOKKEEPING = (FINISH, METER, OTHERS)
TEXTS, NUMBERS = "texts", "figures: numbers"
LOSSES_WRITTEN, TEXTS_WRITTEN = "losses: written", "texts: written"
DRAWN_FIRST, DRAWN = "figures: drawn first, with the import of matplotlib", "figures: drawn"
TOTAL = "total"
OF_A_RUN = "The run of configs/python-docs.yaml, its validations' losses not counted"


def against_silence(task: Task, rounds: int, folder: Path) -> dict[str, Any]:
    """Compare with a trainer without records, in rounds of `CADENCE` steps with one record each."""
    split = Store.open(task.store).split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, task.batch, CADENCE)
    openers = {
        variant.name: partial(opened, variant, task, rows, folder / variant.name) for variant in (SILENT, AS_IT_IS)
    }
    with open_runs(openers) as runs:
        warm_up(runs, CADENCE)
        comparison = compare(runs, rounds, CADENCE, first=CADENCE)
    cost = Ratio.of(comparison.seconds[AS_IT_IS.name], comparison.seconds[SILENT.name])
    return {
        "s a step": median(comparison.seconds[SILENT.name]) / CADENCE,
        "as it is / without records": f"{cost.median:.4f}",
        "95 %": f"{cost.low:.4f} to {cost.high:.4f}",
        "without records against itself": f"{comparison.control.median:.4f}",
        "trusted": comparison.trusted,
        "ratio": asdict(cost),
        "seconds": comparison.seconds,
    }


def direct(task: Task, steps: int, folder: Path) -> dict[str, float]:
    """Return mean seconds per step of each call and of the whole, over `steps` steps after the first `CADENCE`."""
    spent: dict[str, float] = defaultdict(float)
    with training_of(AS_IT_IS, task, folder) as training:
        training.components.loader.steps = _timed_steps(training.components.loader.steps, spent)  # type: ignore[method-assign]
        training.end_step = _timed(training.end_step, spent, FINISH)  # type: ignore[method-assign]
        training.log.add = _timed(training.log.add, spent, METER)  # type: ignore[method-assign]
        with closing(training.steps()) as micro_batches:
            for _ in range(CADENCE):
                train_step(training, *next(micro_batches))
            spent.clear()
            start, others = clock(), time.process_time() - time.thread_time()
            for _ in range(steps):
                train_step(training, *next(micro_batches))
            whole = (clock() - start) / steps
        training.tracker.flush()
        spent[OTHERS] = time.process_time() - time.thread_time() - others
    per_step = {name: spent[name] / steps for name in (*BOOKKEEPING, DATA)}
    return {WHOLE: whole, **per_step, ALL: sum(per_step[name] for name in BOOKKEEPING)}


def of_a_step(spent: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "of a step": what,
            "ms": 1000 * seconds,
            "share of this step": f"{seconds / spent[WHOLE]:.2%}",
            f"of {STEP_S} s": f"{seconds / STEP_S:.3%}",
            f"below {GOAL:.0%} of {STEP_S} s": seconds < GOAL * STEP_S if what in (DATA, ALL) else "",
        }
        for what, seconds in spent.items()
    ]


def of_a_validation(task: Task, folder: Path) -> dict[str, float]:
    """Return seconds of what a validation computes and writes."""
    spent: dict[str, list[float]] = defaultdict(list)
    with training_of(AS_IT_IS, task, folder) as training:
        parts, config, engine, tracker = training.components, training.config, training.engine, training.tracker
        with closing(training.steps()) as micro_batches:
            train_step(training, *next(micro_batches))
        for number in range(REPEATS):
            with training._eval_mode("validation") as run:
                losses = validation_losses(parts.objective, parts.store, parts.validation_ids, config, engine)
                figure_data = _once(spent[NUMBERS], collect_figure_data, run, engine)
                texts = _once(spent[TEXTS], text_samples, run, engine, figure_data)
                _once(spent[LOSSES_WRITTEN], tracker.validation, CADENCE, losses.values, losses.bin_losses)
                for tag, rows in texts.items():
                    _once(spent[TEXTS_WRITTEN], tracker.samples, CADENCE, rows, tag)
                drawing = DRAWN if number else DRAWN_FIRST
                _once(spent[drawing], tracker.log_figures, CADENCE, figure_data, losses.bin_losses, None)
        tracker.flush()
    return {what: median(seconds) for what, seconds in spent.items()}


def of_a_run(measured: RunConfig, step: dict[str, float], validation: dict[str, float]) -> list[dict[str, Any]]:
    """Return the share of each part in a run's steps, given its seconds in a step and in a validation."""
    steps, every = measured.train.steps, measured.validation.every
    validations = [number for number in range(1, steps + 1) if measured.train.is_due(number, every)]
    figures = sum(figures_due(number, measured) for number in validations)
    times = {
        NUMBERS: figures,
        DRAWN_FIRST: min(figures, 1),
        DRAWN: max(figures - 1, 0),
        TEXTS: len(validations),
        TEXTS_WRITTEN: len(validations),
        LOSSES_WRITTEN: len(validations),
    }
    rows = [(ALL, step[ALL], steps), *((what, validation[what], count) for what, count in times.items())]
    total = sum(seconds * count for _, seconds, count in rows)
    return [
        {
            "of a run": what,
            "s": seconds,
            f"times in {steps:,} steps": count,
            "of its steps": f"{seconds * count / (steps * step[WHOLE]):.2%}",
            f"below {GOAL:.0%}": total < GOAL * steps * step[WHOLE] if what == TOTAL else "",
        }
        for what, seconds, count in [*rows, (TOTAL, total, 1)]
    ]


def _once(spent: list[float], call: Callable, *arguments: object) -> Any:
    start = clock()
    try:
        return call(*arguments)
    finally:
        spent.append(clock() - start)


def _timed(call: Callable, spent: dict[str, float], what: str) -> Callable:
    def timed(*arguments: object) -> object:
        start = clock()
        try:
            return call(*arguments)
        finally:
            spent[what] += clock() - start

    return timed


def _timed_steps(steps: Callable[..., Iterable], spent: dict[str, float]) -> Callable[..., Iterator]:
    def timed(*arguments: object) -> Iterator:
        iterator = iter(steps(*arguments))
        while True:
            start = clock()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                spent[DATA] += clock() - start
            yield item

    return timed


def main(argv: Sequence[str] | None = None) -> int:
    measured = load_config(MEASURED)
    shape = measured.model
    options = parser("log_overhead", "What logging takes of a step, and the wait for data.")
    add_settings(options)
    options.add_argument("--width", type=positive, default=shape.width, help="(%(default)s)")
    options.add_argument("--depth", type=positive, default=shape.depth, help="(%(default)s)")
    size = measured.train.global_batch_size
    options.add_argument("--batch", type=positive, default=size, help="samples of a step (%(default)s)")
    options.add_argument("--samples", choices=("documents", "sentences"), default="sentences", help="(%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="in which calls are timed (%(default)s)")
    given = parse(options, argv, width=64, depth=2, batch=4, steps=20, rounds=2)
    measured = load_config(MEASURED, given.settings)
    as_there = tuple(f"{key}={json.dumps(dump(getattr(measured, key)))}" for key in AS_THERE)
    with work_dir(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of(given.samples, SAMPLES))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=given.batch,
            precision="fp32",
            settings=(*as_there, *given.settings),
        )
        print_status("calls of the bookkeeping")
        step = direct(task, given.steps, folder / "direct")
        print_status("a validation")
        validation = of_a_validation(task, folder / "validation")
        print_status(f"{given.rounds} rounds of {CADENCE} steps")
        comparison = against_silence(task, given.rounds, folder / "rounds")
    tables = {
        "Calls": of_a_step(step),
        OF_A_RUN: of_a_run(measured, step, validation),
        "As it is against no records": [comparison],
    }
    report(given, "log_overhead", tables)
    return 0
