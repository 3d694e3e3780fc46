"""What a training run pays besides its steps: logging, pauses for checkpoints, and other processes on its cores.

    python -m benchmarks log_overhead [--batch 64] [--width 256] [--samples sentences] [--quick] [key.sub=value ...]

Measures the trainer with the shape, the intervals and the sampling of `configs/python-docs.yaml`, in two ways:

- The trainer with records against the same trainer without records and TensorBoard, over the same samples with the same
  noise, in turns. Differences below the interval cannot be seen this way.
- Each call of the bookkeeping by itself, while the trainer reads from its own loader. "other threads" is what the
  process used besides the thread that trains: TensorBoard writes its files from a thread of its own.

The cost does not depend on the network's size, and that run's half a second is among the shortest steps.

What a validation writes to TensorBoard is measured as well, with the forward passes behind the figures and texts. The
total is over that run, each part as often as it occurs there, as a share of its steps. The losses of a validation are
not included: they are its purpose.

    python -m benchmarks checkpoint_stall STORE [--saves 5] [key.sub=value ...]

One process trains a model of about 100 million parameters and saves after every ninth step, in turns: while training
continues, waiting, and with `torch.save` (which neither syncs nor hashes, and is not safe in a crash). For each kind
the table has the median stall, the median time until the checkpoint is complete, and how much longer than usual the
steps took that ran during the writing.

    python -m benchmarks busy [--loops 4] [--threads 2] [--steps 40] [--rounds 5] [--quick] [key.sub=value ...]

Runs `mmldlm train` on the quickstart's network, each run in a process of its own and in turns: with libgomp's default
spin count, which is set explicitly so that the trainer chooses none, and with the one that the trainer chooses at its
start. A run's speed leaves out the first quarter of its steps. "others" is the number of cores that other processes
kept busy, by the run's own records: without loops it has to be near 0, or the machine was not quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import LocalRun, Ratio, clock, compare, open_runs, warm_up
from benchmarks.common.report import (
    ROOT,
    add_settings,
    parse,
    parser,
    plain_parser,
    positive,
    print_status,
    report,
    work_dir,
)
from benchmarks.common.task import Task, heads_of, lengths_of, random_store, typical_batches
from benchmarks.common.variants import Variant, entered, opened
from mmldlm.batch import Batch
from mmldlm.config import RunConfig, load_config
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.launcher import read_launcher_env
from mmldlm.evaluation.validate import validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figures_due, text_samples
from mmldlm.settings.declaration import dump
from mmldlm.train import train_step
from mmldlm.trainer.checkpointer import SavedCheckpoint
from mmldlm.trainer.step import StepTotals
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.host_cpus import OPENMP_SETTINGS, SPIN_CHOICE_ENV

# --- logging --------------------------------------------------------------------------------------

MEASURED = ROOT / "configs" / "python-docs.yaml"
MEASURED_GROUPS = ("mode", "sampling")  # its settings besides shape and intervals
CADENCE = 10  # steps from record to record: the default of log.every
GOAL = 0.01  # of a step, for logging, and for the data
REPEATS = 3  # of a validation; medians count
STEP_S = 0.5  # the step that the goal is of
SAMPLES = 4096  # of the store
WITHOUT = Variant("without records", "", settings=("log={every: 1000000, tensorboard: false}",))
WITH = Variant("with records", "")
FINISH, STATISTICS = "end of the step, with a record every tenth", "step statistics"
DATA, OTHERS = "wait for data", "other threads"
ALL, WHOLE = "all bookkeeping", "whole step"
BOOKKEEPING = (FINISH, STATISTICS, OTHERS)
TEXTS, NUMBERS = "texts", "figures: numbers"
LOSSES_WRITTEN, TEXTS_WRITTEN = "losses: written", "texts: written"
DRAWN_FIRST, DRAWN = "figures: drawn first, with the import of matplotlib", "figures: drawn"
TOTAL = "total"
RUN_TITLE = "The run of configs/python-docs.yaml, its validations' losses not counted"


def compare_records(task: Task, rounds: int, folder: Path) -> dict[str, Any]:
    """Compare with a trainer without records, in rounds of `CADENCE` steps with one record each."""
    split = Store.open(task.store).split("train")
    rows = typical_batches(SampleOrder(split.lengths, seed=0), split, task.batch, CADENCE)
    openers = {variant.name: partial(opened, variant, task, rows, folder / variant.name) for variant in (WITHOUT, WITH)}
    with open_runs(openers) as runs:
        warm_up(runs, CADENCE)
        comparison = compare(runs, rounds, CADENCE, first=CADENCE)
    cost = Ratio.of(comparison.seconds[WITH.name], comparison.seconds[WITHOUT.name])
    return {
        "s a step": median(comparison.seconds[WITHOUT.name]) / CADENCE,
        "with / without records": f"{cost.median:.4f}",
        "95 %": f"{cost.low:.4f} to {cost.high:.4f}",
        "without records against itself": f"{comparison.control.median:.4f}",
        "trusted": comparison.trusted,
        "ratio": asdict(cost),
        "seconds": comparison.seconds,
    }


class TimedTrainer(Trainer):
    """Trainer that adds up the seconds of its bookkeeping, and of its wait for data, in `spent`."""

    def __init__(self, config: RunConfig):
        super().__init__(config)
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = clock()
        yield
        self.spent[what] += clock() - start

    def _remaining_steps(self) -> Iterator[tuple[int, list[Batch]]]:
        batches = super()._remaining_steps()
        while True:
            with self._timed(DATA):
                step = next(batches)  # the last is never reached
            yield step

    def loss(self, batch: NoisedBatch, totals: StepTotals) -> Tensor:
        loss, sums = self.components.objective(self.engine.forward, batch, totals.counts)
        with self._timed(STATISTICS):
            self.log.add(loss, sums, batch)
        return loss

    def end_step(self, *arguments: Any) -> None:
        with self._timed(FINISH):
            super().end_step(*arguments)


def time_calls(task: Task, steps: int, folder: Path) -> dict[str, float]:
    """Return mean seconds per step of each call and of the whole, over `steps` steps after the first `CADENCE`."""
    with entered(TimedTrainer(task.config(folder / "run")), folder) as trainer:
        spent = trainer.spent
        with closing(trainer.steps()) as micro_batches:
            for _ in range(CADENCE):
                train_step(trainer, *next(micro_batches))
            spent.clear()
            start, others = clock(), time.process_time() - time.thread_time()
            for _ in range(steps):
                train_step(trainer, *next(micro_batches))
            whole = (clock() - start) / steps
        trainer.tracker.flush()
        spent[OTHERS] = time.process_time() - time.thread_time() - others
    per_step = {name: spent[name] / steps for name in (*BOOKKEEPING, DATA)}
    return {WHOLE: whole, **per_step, ALL: sum(per_step[name] for name in BOOKKEEPING)}


def step_rows(spent: dict[str, float]) -> list[dict[str, Any]]:
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


def time_validation(task: Task, folder: Path) -> dict[str, float]:
    """Return seconds of what a validation computes and writes."""
    spent: dict[str, list[float]] = defaultdict(list)
    with entered(Trainer(task.config(folder / "run")), folder) as trainer:
        parts, config, engine, tracker = trainer.components, trainer.config, trainer.engine, trainer.tracker
        with closing(trainer.steps()) as micro_batches:
            train_step(trainer, *next(micro_batches))
        for number in range(REPEATS):
            with trainer._eval_mode("validation") as run:
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


def run_rows(measured: RunConfig, step: dict[str, float], validation: dict[str, float]) -> list[dict[str, Any]]:
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


def log_main(argv: Sequence[str] | None = None) -> int:
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
    groups = tuple(f"{key}={json.dumps(dump(getattr(measured, key)))}" for key in MEASURED_GROUPS)
    with work_dir(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of(given.samples, SAMPLES))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=given.batch,
            precision="fp32",
            settings=(*groups, *given.settings),
        )
        print_status("calls of the bookkeeping")
        step = time_calls(task, given.steps, folder / "calls")
        print_status("a validation")
        validation = time_validation(task, folder / "validation")
        print_status(f"{given.rounds} rounds of {CADENCE} steps")
        comparison = compare_records(task, given.rounds, folder / "rounds")
    tables = {
        "Calls": step_rows(step),
        RUN_TITLE: run_rows(measured, step, validation),
        "With records against without": [comparison],
    }
    report(given, "log_overhead", tables)
    return 0


# --- checkpoints ----------------------------------------------------------------------------------

INTERVAL = 9  # steps from one save to the next: it is complete by then
SAVES = ("asynchronous", "synchronous", "torch.save")
STALL_SETTINGS = (
    "model={depth: 12, width: 768, num_heads: 12}",
    "train.global_batch_size=4",
    "log={every: 100000, tensorboard: false}",
    "validation.every=0",
    "checkpoint={every_steps: 0, keep_last: 1}",
)


def plain_save(run: Trainer, folder: Path) -> float:
    start = time.perf_counter()
    model, optimizer = run.engine.unwrapped_model, run.engine.unwrapped_optimizer
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    return time.perf_counter() - start


def stall_main(argv: Sequence[str] | None = None) -> None:
    stall_parser = plain_parser("checkpoint_stall", "How long training pauses for a checkpoint.")
    stall_parser.add_argument("store")
    stall_parser.add_argument("--saves", type=int, default=5, help="of each kind")
    stall_parser.add_argument("settings", nargs="*")
    options = stall_parser.parse_intermixed_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        measure_stalls(options, Path(folder))


def measure_stalls(options: argparse.Namespace, folder: Path) -> None:
    total = INTERVAL * (len(SAVES) * options.saves + 2)
    given = [f"run.dir={folder / 'run'}", f"data.path={options.store}", f"train.steps={total}"]
    config = load_config(None, [*STALL_SETTINGS, *given, *options.settings])
    steps: dict[str, list[float]] = defaultdict(list)
    stalls: dict[str, list[float]] = defaultdict(list)
    complete: dict[str, list[float]] = defaultdict(list)
    kind, saved = "", 0

    class Recorder(Trainer):
        def _log_checkpoints(self, checkpoints: Sequence[SavedCheckpoint]) -> None:
            for checkpoint in checkpoints:
                stalls[kind].append(checkpoint.stall_s)
                complete[kind].append(checkpoint.seconds)
            super()._log_checkpoints(checkpoints)

    with Recorder(config, read_launcher_env(os.environ)) as run:
        for number, micro_batches in run.steps():
            start = time.perf_counter()
            train_step(run, number, micro_batches)
            steps[kind].append(time.perf_counter() - start)
            if run.state.step % INTERVAL or run.state.step == total:
                continue
            run._log_checkpoints(run.checkpointer.finish())  # none is unfinished when the next begins
            kind = SAVES[saved % len(SAVES)]
            saved += 1
            if kind == "torch.save":
                stalls[kind].append(plain_save(run, folder))
                complete[kind].append(stalls[kind][-1])
            else:
                checkpoint = replace(config.checkpoint, async_=kind == SAVES[0])
                run.checkpointer.config = replace(config, checkpoint=checkpoint)
                run.save()
        kind = "end"
        size = run.components.trainable
    usual = median(steps["torch.save"] + steps["synchronous"])
    print(f"{size / 1e6:.0f} million parameters, {torch.get_num_threads()} threads; a step takes {usual:.2f} s.\n")
    print("| checkpoint | stall (s) | in steps | until complete (s) | steps meanwhile |")
    print("|---|---|---|---|---|")
    for kind in SAVES:
        stall, until = median(stalls[kind][1:]), median(complete[kind][1:])  # the first allocates
        meanwhile = median(steps[kind]) / usual
        print(f"| {kind} | {stall:.2f} | {stall / usual:.2f} | {until:.2f} | {meanwhile:.2f} x |")


# --- other processes ------------------------------------------------------------------------------

DEFAULT, CHOSEN = "default", "chosen"
DEFAULT_SPIN = "300000"  # of libgomp
GOALS = {False: 0.97, True: 2.5}  # chosen over default, by whether there are busy loops
BUSY_SAMPLES = 10_000
EVERY = 5  # steps of a record
BUSY_SETTINGS = ("validation.every=0", "checkpoint.every_steps=0", f"log={{every: {EVERY}, tensorboard: false}}")


@contextmanager
def busy_loops(count: int, niceness: int = 0) -> Iterator[None]:
    """Run `count` processes that keep one core busy each, at the given niceness; they end with this process."""
    loop = f"import os\nos.nice({niceness})\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class RunSpeed:
    """Speed of one training run."""

    tokens_per_s: float
    others: float
    openmp: str


@dataclass
class Training:
    """A run to compare whose step is a whole training of `steps` steps, in a process of its own."""

    kind: str
    threads: int
    steps: int
    settings: Sequence[str]
    folder: Path
    runs: list[RunSpeed] = field(default_factory=list)

    def step(self, number: int) -> float:
        """Return seconds per token."""
        run = self.folder / f"{self.kind}-{len(self.runs)}"
        environment = {
            key: value for key, value in os.environ.items() if key not in (*OPENMP_SETTINGS, SPIN_CHOICE_ENV)
        }
        environment |= {"OMP_NUM_THREADS": str(self.threads)}
        environment |= {"GOMP_SPINCOUNT": DEFAULT_SPIN} if self.kind == DEFAULT else {}
        command = [
            sys.executable,
            "-m",
            "mmldlm.cli",
            "train",
            "configs/quickstart.yaml",
            *BUSY_SETTINGS,
            *self.settings,
        ]
        command += [f"train.steps={self.steps}", f"run.dir={run}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{self.kind}: {done.stderr[-2000:]}")
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        counted = [record for record in records if record["kind"] == "train" and record["step"] > self.steps / 4]
        seconds = [record["speed/step_s"] for record in counted]
        tokens = [record["speed/tokens_per_s"] * s for record, s in zip(counted, seconds, strict=True)]
        speed = RunSpeed(
            tokens_per_s=sum(tokens) / sum(seconds),
            others=fmean(record["speed/cores_of_others"] for record in counted),
            openmp=json.loads((run / "startup.json").read_text())["ranks"][0]["openmp"],
        )
        print_status(f"{self.kind}: {speed.tokens_per_s:,.0f} tokens/s; {speed.openmp}")
        self.runs.append(speed)
        return 1 / speed.tokens_per_s


def measure_busy(loops: int, options: Any, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compare both spin counts next to `loops` busy loops."""
    print_status(f"{loops} busy loops")
    trainings = {kind: Training(kind, options.threads, options.steps, settings, folder) for kind in (DEFAULT, CHOSEN)}
    with busy_loops(loops):
        comparison = compare({kind: LocalRun(each) for kind, each in trainings.items()}, options.rounds, 1, first=0)
    runs = {kind: training.runs for kind, training in trainings.items()}
    ratio, goal = comparison.speed(CHOSEN), GOALS[loops > 0]
    short = sum(run.openmp.startswith("short") for run in runs[CHOSEN])
    return {
        "busy loops": loops,
        **{f"{kind}, tokens/s": median(run.tokens_per_s for run in of_kind) for kind, of_kind in runs.items()},
        "chosen / default": ratio.median,
        "95 % low": ratio.low,
        "high": ratio.high,
        "default against itself": comparison.control.median,
        "goal": goal,
        "met": ratio.median >= goal,
        "short spinning chosen": f"{short} of {len(runs[CHOSEN])}",
        **{f"others, {kind}": median(run.others for run in of_kind) for kind, of_kind in runs.items()},
        "runs": {kind: [asdict(run) for run in of_kind] for kind, of_kind in runs.items()},
    }


def busy_main(argv: Sequence[str] | None = None) -> int:
    options = parser("busy", "Training with several threads, alone and next to busy loops, by OpenMP's spinning.")
    add_settings(options)
    options.add_argument("--loops", type=positive, default=4, help="processes that keep a core busy (%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="of each run (%(default)s)")
    options.set_defaults(threads=2, rounds=5)
    given = parse(options, argv, steps=2 * EVERY, rounds=1)
    with work_dir(given) as folder:
        settings = (
            f"data.path={random_store(folder / 'store', lengths_of('sentences', BUSY_SAMPLES))}",
            *given.settings,
        )
        rows = [measure_busy(loops, given, settings, folder / f"{loops}-loops") for loops in (0, given.loops)]
    report(given, "busy", {"Trainer": rows})
    return 0
