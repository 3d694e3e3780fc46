"""Tokens per second of training with several threads, alone and next to busy loops, by how OpenMP's threads wait.

    python -m benchmarks busy [--loops 4] [--threads 2] [--steps 40] [--rounds 5] [--quick] [key.sub=value ...]

`mmldlm train` on the quickstart's network, each run a process of its own: with libgomp's own spin count, which the
environment names so that nothing is chosen, and with the one that the trainer chooses at its start, in turns. A run's
speed leaves out the first quarter of its steps. "others" is how many cores other processes kept busy by the run's own
records: without loops it has to be near 0, or the row is no figure of a quiet machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common.measure import LocalRun, compare
from benchmarks.common.report import ROOT, add_settings, parse, parser, positive, print_status, report, work_dir
from benchmarks.common.task import lengths_of, random_store
from mmldlm.utils.host_cpus import OPENMP_SETTINGS, SPIN_CHOICE_ENV

DEFAULT, CHOSEN = "default", "chosen"
DEFAULT_SPIN = "300000"  # of libgomp
GOALS = {False: 0.97, True: 2.5}  # chosen over default, by whether there are busy loops
SAMPLES = 10_000
EVERY = 5  # steps of a record
SETTINGS = ("validation.every=0", "checkpoint.every_steps=0", f"log={{every: {EVERY}, tensorboard: false}}")


@contextmanager
def busy_loops(count: int, niceness: int = 0) -> Iterator[None]:
    """Processes that keep a core busy each, while this one lives; the nicer, the more they leave to others."""
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
    """One training."""

    tokens_per_s: float
    others: float
    openmp: str


@dataclass
class Training:
    """Trains `steps` steps in a process of its own each time that it is asked for a step."""

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
        command = [sys.executable, "-m", "mmldlm.cli", "train", "configs/quickstart.yaml", *SETTINGS, *self.settings]
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


def measure(loops: int, options: Any, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compare both ways next to `loops` busy loops."""
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


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("busy", "Training with several threads, alone and next to busy loops, by OpenMP's spinning.")
    add_settings(options)
    options.add_argument("--loops", type=positive, default=4, help="processes that keep a core busy (%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="of each run (%(default)s)")
    options.set_defaults(threads=2, rounds=5)
    given = parse(options, argv, steps=2 * EVERY, rounds=1)
    with work_dir(given) as folder:
        settings = (f"data.path={random_store(folder / 'store', lengths_of('sentences', SAMPLES))}", *given.settings)
        rows = [measure(loops, given, settings, folder / f"{loops}-loops") for loops in (0, given.loops)]
    report(given, "busy", {"Trainer": rows})
    return 0
