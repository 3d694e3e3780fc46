"""What a step's bookkeeping costs: log records, TensorBoard, meter, guard and counting; and the wait for data.

    python -m benchmarks log_overhead [--batch 8] [--width 256] [--samples sentences] [--quick] [key.sub=value ...]

The real trainer with its defaults: a record every ten steps. It is measured in two ways:

- as it is against the same trainer without records and TensorBoard, over the same samples with the same noise, in
  turns. No difference below the interval can be told so.
- each call of the bookkeeping by itself, while the trainer reads from its own loader. "other threads" is what the
  process used besides the thread that trains: TensorBoard writes its files from one of its own.

The share that counts is that of a step of half a second: bookkeeping costs the same whatever the network's size.

What a validation leaves in TensorBoard is measured as well. Its numbers come from passes of the network, so their share
is that of this network's own steps, as many of them as lie between two validations, or two times of figures.
"""

from __future__ import annotations

import gc
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
from benchmarks.results import say
from benchmarks.task import Task, heads_of
from benchmarks.variants import Variant, opened, training_of
from benchmarks.workload import lengths_of, typical_batches
from mmldlm.data.order import SampleOrder
from mmldlm.data.shards import Store
from mmldlm.guard import poisoned
from mmldlm.pictures import take_pictures
from mmldlm.train import train_step
from mmldlm.validation import text_samples, validation_losses

CADENCE = 10  # steps from record to record: the default of log.every
GOAL = 0.01  # of a step, for all bookkeeping, and for the data
STEP_S = 0.5  # the step that the goal is of
SAMPLES = 4096  # of the store
SILENT = Variant("without records", "", settings=("log={every: 1000000, tensorboard: false}",))
AS_IT_IS = Variant("as it is", "")
VALIDATED = Variant("with validations", "", settings=("validation.every=200",))  # as often as in the quickstart
FINISH, METER, LOSS, LIMIT = "end of the step", "meter", "guard, of the loss", "guard, limit of the norm"
SETTLE, RECORD, BOARD = "of it: numbers and guard", "of it: a record every tenth step", "of that: TensorBoard"
DATA, OTHERS = "wait for data", "other threads"
ALL = "all bookkeeping"
BOOKKEEPING = (FINISH, METER, LOSS, LIMIT, OTHERS)


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


def direct(task: Task, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds of each call in the mean of a step, over `steps` steps after the first `CADENCE`."""
    spent: dict[str, float] = defaultdict(float)
    with training_of(AS_IT_IS, task, folder) as training:
        training.parts.loader.steps = _timed_steps(training.parts.loader.steps, spent)  # type: ignore[method-assign]
        calls = {
            FINISH: (training, "finish_step"),
            SETTLE: (training, "settle"),
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
        spent[LOSS] = steps * _mean_s(lambda: poisoned(torch.ones((), requires_grad=True)).backward())
    order = (FINISH, SETTLE, RECORD, BOARD, METER, LOSS, LIMIT, OTHERS, DATA)
    each = {what: spent[what] / steps for what in order}
    rows = [("whole step", whole), *each.items(), (ALL, sum(each[what] for what in BOOKKEEPING))]
    return [
        {
            "of a step": what,
            "ms": 1000 * seconds,
            "share of this step": f"{seconds / whole:.2%}",
            f"of {STEP_S} s": f"{seconds / STEP_S:.3%}",
            f"below {GOAL:.0%} of {STEP_S} s": seconds < GOAL * STEP_S if what in (DATA, ALL) else "",
        }
        for what, seconds in rows
    ]


def of_a_validation(task: Task, folder: Path) -> list[dict[str, Any]]:
    """CPU seconds of what a validation computes and writes, and their share of the steps between two of them."""
    with training_of(VALIDATED, task, folder) as training:
        parts, config, runtime, tracker = training.parts, training.config, training.runtime, training.tracker
        with closing(training.steps()) as micro_batches:
            for _ in range(CADENCE):
                train_step(training, *next(micro_batches))
            began = clock()
            for _ in range(CADENCE):
                train_step(training, *next(micro_batches))
            step_s = (clock() - began) / CADENCE
        spent: dict[str, float] = {}
        with torch.no_grad():
            arguments = parts.objective, parts.store
            found = _once(spent, "losses", validation_losses, *arguments, parts.validation_ids, config, runtime)
            texts = _once(spent, "texts", text_samples, *arguments, parts.tokenizer, config, runtime, False)
            pictures = _once(spent, "figures: numbers", take_pictures, *arguments, config, runtime)
        _once(spent, "losses: written", tracker.validation, CADENCE, found.values, found.levels)
        for tag, rows in texts.items():
            _once(spent, "texts: written", tracker.samples, CADENCE, rows, tag)
        for what in ("figures: drawn first, with the import of matplotlib", "figures: drawn"):
            _once(spent, what, tracker.pictures, CADENCE, pictures, found.levels, None)
    every = {"figures": config.log.figures_every}
    return [
        {
            "of a validation": what,
            "s": seconds,
            "every so many steps": (steps := every.get(what.partition(":")[0], config.validation.every)),
            "share of those steps": f"{seconds / steps / step_s:.2%}",
            f"of as many of {STEP_S} s": f"{seconds / steps / STEP_S:.2%}",
        }
        for what, seconds in spent.items()
    ]


def _once(spent: dict[str, float], what: str, call: Callable, *arguments: object) -> Any:
    began = clock()
    try:
        return call(*arguments)
    finally:
        spent[what] = spent.get(what, 0.0) + clock() - began


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
    options = parser("log_overhead", "What of a step bookkeeping takes, and the wait for data.")
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--batch", type=positive, default=8, help="samples of a step (%(default)s)")
    options.add_argument("--samples", choices=("documents", "sentences"), default="documents", help="(%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="in which calls are timed (%(default)s)")
    given = parse(options, argv, width=64, depth=2, batch=4, steps=20, rounds=2)
    with workplace(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of(given.samples, SAMPLES))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=given.batch,
            precision="fp32",
            settings=tuple(given.settings),
        )
        say("calls of the bookkeeping")
        calls = direct(task, given.steps, folder / "direct")
        say("a validation")
        validation = of_a_validation(task, folder / "validation")
        say(f"{given.rounds} rounds of {CADENCE} steps")
        tables = {
            "Calls": calls,
            "A validation": validation,
            "As it is against no records": [against_silence(task, given.rounds, folder / "rounds")],
        }
    report(given, "log_overhead", tables)
    return 0
