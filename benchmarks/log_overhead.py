"""What it costs to see a run: log records, TensorBoard, meter, guard and counting; figures and texts; and the wait for
data.

    python -m benchmarks log_overhead [--batch 64] [--width 256] [--samples sentences] [--quick] [key.sub=value ...]

The real trainer at the shape, the cadence and the sampling of `configs/python-docs.yaml`. A step's bookkeeping is
measured in two ways:

- as it is against the same trainer without records and TensorBoard, over the same samples with the same noise, in
  turns. No difference below the interval can be told so.
- each call of the bookkeeping by itself, while the trainer reads from its own loader. "other threads" is what the
  process used besides the thread that trains: TensorBoard writes its files from one of its own.

It costs the same whatever the network's size: that run's half a second is among the shortest steps.

What a validation leaves in TensorBoard is measured as well: what is written, and the passes of the network behind the
figures and the texts. The total is of all that over that run, each part as often as it comes there, as a
share of its steps. The losses of a validation are not of it: they are what a validation is for.
"""

from __future__ import annotations

import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import CONTROL, Ratio, clock, run_rounds, trusted
from benchmarks.random_store import random_store
from benchmarks.report import parse, parser, positive, report, workplace
from benchmarks.results import ROOT, say
from benchmarks.task import Task, heads_of
from benchmarks.variants import Variant, opened, training_of
from benchmarks.workload import lengths_of, typical_batches
from mmldlm.config import RunConfig, load_config
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.evaluation.validate import validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figures_due, text_samples
from mmldlm.settings.fields import dump
from mmldlm.train import train_step
from mmldlm.trainer.step_guard import propagate_nonfinite

MEASURED = ROOT / "configs" / "python-docs.yaml"
AS_THERE = ("mode", "sampling")  # its settings beside shape and cadence
CADENCE = 10  # steps from record to record: the default of log.every
GOAL = 0.01  # of a step, for all that shows the run, and for the data
REPEATS = 3  # of what a validation does, of which medians count
STEP_S = 0.5  # the step that the goal is of
SAMPLES = 4096  # of the store
SILENT = Variant("without records", "", settings=("log={every: 1000000, tensorboard: false}",))
AS_IT_IS = Variant("as it is", "")
FINISH, METER, LOSS, LIMIT = "end of the step", "meter", "guard, of the loss", "guard, limit of the norm"
SETTLE, RECORD, BOARD = "of it: numbers and guard", "of it: a record every tenth step", "of that: TensorBoard"
DATA, OTHERS = "wait for data", "other threads"
ALL, WHOLE = "all bookkeeping", "whole step"
BOOKKEEPING = (FINISH, METER, LOSS, LIMIT, OTHERS)
TEXTS, NUMBERS = "texts", "figures: numbers"
LOSSES_WRITTEN, TEXTS_WRITTEN = "losses: written", "texts: written"
DRAWN_FIRST, DRAWN = "figures: drawn first, with the import of matplotlib", "figures: drawn"
TOTAL = "total"
OF_A_RUN = "The run of configs/python-docs.yaml, its validations' losses not counted"


def against_silence(task: Task, rounds: int, folder: Path) -> dict[str, Any]:
    """Time as it is over time without records, in rounds of `CADENCE` steps: one record each."""
    split = Store.open(task.store).split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, task.batch, CADENCE)
    with ExitStack() as stack:
        runs = {
            variant.name: stack.enter_context(opened(variant, task, rows, folder / str(number)))
            for number, variant in enumerate((SILENT, AS_IT_IS))
        }
        for run in runs.values():
            for number in range(CADENCE):
                run.step(number)
        gc.collect()
        gc.freeze()
        seconds = run_rounds(runs, rounds, CADENCE, first=CADENCE).seconds
        gc.unfreeze()
    found = Ratio.of(seconds[AS_IT_IS.name], seconds[SILENT.name])
    control = Ratio.of(seconds[CONTROL], seconds[SILENT.name])
    return {
        "s a step": median(seconds[SILENT.name]) / CADENCE,
        "as it is / without records": f"{found.median:.4f}",
        "95 %": f"{found.low:.4f} to {found.high:.4f}",
        "without records against itself": f"{control.median:.4f}",
        "trusted": trusted(control),
        "ratio": asdict(found),
        "seconds": seconds,
    }


def direct(task: Task, steps: int, folder: Path) -> dict[str, float]:
    """Seconds of each call, and of the whole, in the mean of a step, over `steps` steps after the first `CADENCE`."""
    spent: dict[str, float] = defaultdict(float)
    with training_of(AS_IT_IS, task, folder) as training:
        training.components.loader.steps = _timed_steps(training.components.loader.steps, spent)  # type: ignore[method-assign]
        calls = {
            FINISH: (training, "finish_step"),
            SETTLE: (training, "fetch_step_stats"),
            RECORD: (training, "_log"),
            BOARD: (training.tracker._board, "scalars"),
            METER: (training.meter, "add"),
        }
        for what, (owner, name) in calls.items():
            setattr(owner, name, _timed(getattr(owner, name), spent, what))
        with closing(training.steps()) as micro_batches:
            for _ in range(CADENCE):
                train_step(training, *next(micro_batches))
            spent.clear()
            began, others = clock(), time.process_time() - time.thread_time()
            for _ in range(steps):
                train_step(training, *next(micro_batches))
            whole = (clock() - began) / steps
        training.tracker.flush()
        spent[OTHERS] = time.process_time() - time.thread_time() - others
        spent[LIMIT] = steps * _mean_s(lambda: training.guard.norm_limit)
        spent[LOSS] = steps * _mean_s(lambda: propagate_nonfinite(torch.ones((), requires_grad=True)).backward())
    order = (FINISH, SETTLE, RECORD, BOARD, METER, LOSS, LIMIT, OTHERS, DATA)
    each = {what: spent[what] / steps for what in order}
    return {WHOLE: whole, **each, ALL: sum(each[what] for what in BOOKKEEPING)}


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
    """Seconds of what a validation computes and writes."""
    spent: dict[str, list[float]] = defaultdict(list)
    with training_of(AS_IT_IS, task, folder) as training:
        parts, config, runtime, tracker = training.components, training.config, training.runtime, training.tracker
        with closing(training.steps()) as micro_batches:
            train_step(training, *next(micro_batches))
        run = training._as_loaded_run()
        for number in range(REPEATS):
            with training._eval_mode("validation"):
                found = validation_losses(parts.objective, parts.store, parts.validation_ids, config, runtime)
                pictures = _once(spent[NUMBERS], collect_figure_data, run, runtime)
                texts = _once(spent[TEXTS], text_samples, run, runtime, pictures)
                _once(spent[LOSSES_WRITTEN], tracker.validation, CADENCE, found.values, found.bin_losses)
                for tag, rows in texts.items():
                    _once(spent[TEXTS_WRITTEN], tracker.samples, CADENCE, rows, tag)
                drawing = DRAWN if number else DRAWN_FIRST
                _once(spent[drawing], tracker.log_figures, CADENCE, pictures, found.bin_losses, None)
        tracker.flush()
    return {what: median(seconds) for what, seconds in spent.items()}


def of_a_run(measured: RunConfig, step: dict[str, float], validation: dict[str, float]) -> list[dict[str, Any]]:
    """What each part takes of a run's steps, given the seconds of its parts in a step and in a validation."""
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
    began = clock()
    try:
        return call(*arguments)
    finally:
        spent.append(clock() - began)


def _timed(call: Callable, spent: dict[str, float], what: str) -> Callable:
    def timed(*arguments: object) -> object:
        began = clock()
        try:
            return call(*arguments)
        finally:
            spent[what] += clock() - began

    return timed


def _timed_steps(steps: Callable[..., Iterable], spent: dict[str, float]) -> Callable[..., Iterator]:
    def timed(*arguments: object) -> Iterator:
        found = iter(steps(*arguments))
        while True:
            began = clock()
            try:
                item = next(found)
            except StopIteration:
                return
            finally:
                spent[DATA] += clock() - began
            yield item

    return timed


def _mean_s(call: Callable[[], object], calls: int = 200) -> float:
    """Seconds of one of many calls: for what cannot be timed in its place."""
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls


def main(argv: Sequence[str] | None = None) -> int:
    measured = load_config(MEASURED)
    shape = measured.model
    options = parser("log_overhead", "What of a step it takes to see the run, and the wait for data.")
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    options.add_argument("--width", type=positive, default=shape.width, help="(%(default)s)")
    options.add_argument("--depth", type=positive, default=shape.depth, help="(%(default)s)")
    size = measured.train.global_batch_size
    options.add_argument("--batch", type=positive, default=size, help="samples of a step (%(default)s)")
    options.add_argument("--samples", choices=("documents", "sentences"), default="sentences", help="(%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="in which calls are timed (%(default)s)")
    given = parse(options, argv, width=64, depth=2, batch=4, steps=20, rounds=2)
    measured = load_config(MEASURED, given.settings)
    as_there = tuple(f"{key}={json.dumps(dump(getattr(measured, key)))}" for key in AS_THERE)
    with workplace(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of(given.samples, SAMPLES))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=given.batch,
            precision="fp32",
            settings=(*as_there, *given.settings),
        )
        say("calls of the bookkeeping")
        step = direct(task, given.steps, folder / "direct")
        say("a validation")
        validation = of_a_validation(task, folder / "validation")
        say(f"{given.rounds} rounds of {CADENCE} steps")
        against = against_silence(task, given.rounds, folder / "rounds")
    tables = {
        "Calls": of_a_step(step),
        OF_A_RUN: of_a_run(measured, step, validation),
        "As it is against no records": [against],
    }
    report(given, "log_overhead", tables)
    return 0
