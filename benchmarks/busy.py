"""Tokens a second of training with several threads, alone and beside busy loops, by how OpenMP's threads wait.

    python -m benchmarks busy [--loops 4] [--threads 2] [--steps 40] [--rounds 5] [--quick] [key.sub=value ...]

`mmldlm train` on the quickstart's network, each run a process of its own: once with libgomp's own spin count, which
the environment names so that nothing is chosen, and once as the trainer chooses at its start. The two take turns in an
order drawn anew, without load and beside the loops. A run's speed leaves out the first quarter of its steps. "others"
is how many cores other processes kept busy by the run's own records: without loops it has to be near 0, or the row is
no figure of a quiet machine.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.measure import Ratio
from benchmarks.random_store import random_store
from benchmarks.report import parse, parser, positive, report, workplace
from benchmarks.results import ROOT, say
from benchmarks.workload import lengths_of
from mmldlm.utils.host_cpus import OPENMP_SETTINGS, SPIN_CHOICE_ENV

DEFAULT, CHOSEN = "default", "chosen"
DEFAULT_SPIN = "300000"  # of libgomp
GOALS = {False: 0.97, True: 2.5}  # chosen over default, by whether there are busy loops
SAMPLES = 10_000
EVERY = 5  # steps of a record
SETTINGS = ("validation.every=0", "checkpoint.every_steps=0", f"log={{every: {EVERY}, tensorboard: false}}")


@dataclass(frozen=True)
class Found:
    """One run."""

    tokens_per_s: float
    others: float
    openmp: str


@contextmanager
def busy_loops(count: int, niceness: int = 0) -> Iterator[None]:
    """Processes that keep a core busy each, as long as this one lives; the nicer, the more they leave it to others."""
    loop = f"import os\nos.nice({niceness})\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def trained(kind: str, threads: int, steps: int, settings: Sequence[str], run: Path) -> Found:
    """A training of `steps` steps in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in (*OPENMP_SETTINGS, SPIN_CHOICE_ENV)}
    environment |= {"OMP_NUM_THREADS": str(threads)} | ({"GOMP_SPINCOUNT": DEFAULT_SPIN} if kind == DEFAULT else {})
    command = [sys.executable, "-m", "mmldlm.cli", "train", "configs/quickstart.yaml", *SETTINGS, *settings]
    done = subprocess.run(
        [*command, f"train.steps={steps}", f"run.dir={run}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr[-2000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counted = [record for record in records if record["kind"] == "train" and record["step"] > steps / 4]
    seconds = [record["speed/step_s"] for record in counted]
    tokens = [record["speed/tokens_per_s"] * of for record, of in zip(counted, seconds, strict=True)]
    return Found(
        tokens_per_s=sum(tokens) / sum(seconds),
        others=fmean(record["speed/cores_of_others"] for record in counted),
        openmp=json.loads((run / "startup.json").read_text())["ranks"][0]["openmp"],
    )


def row(loops: int, found: dict[str, list[Found]]) -> dict[str, Any]:
    speeds = {kind: [each.tokens_per_s for each in of] for kind, of in found.items()}
    ratio, goal = Ratio.of(speeds[CHOSEN], speeds[DEFAULT]), GOALS[loops > 0]
    short = sum(each.openmp.startswith("short") for each in found[CHOSEN])
    return {
        "busy loops": loops,
        **{f"{kind}, tokens/s": median(values) for kind, values in speeds.items()},
        "chosen / default": ratio.median,
        "95 % low": ratio.low,
        "high": ratio.high,
        "goal": goal,
        "met": ratio.median >= goal,
        "short spinning chosen": f"{short} of {len(found[CHOSEN])}",
        **{f"others, {kind}": median(each.others for each in of) for kind, of in found.items()},
        "runs": {kind: [asdict(each) for each in of] for kind, of in found.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("busy", "Training with several threads, alone and beside busy loops, by OpenMP's spinning.")
    options.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    options.add_argument("--loops", type=positive, default=4, help="processes that keep a core busy (%(default)s)")
    options.add_argument("--steps", type=positive, default=40, help="of each run (%(default)s)")
    options.set_defaults(threads=2, rounds=5)
    given = parse(options, argv, steps=2 * EVERY, rounds=1)
    draw, loads = random.Random(0), (0, given.loops)
    found: dict[int, dict[str, list[Found]]] = {loops: {DEFAULT: [], CHOSEN: []} for loops in loads}
    with workplace(given) as folder:
        settings = (f"data.path={random_store(folder / 'store', lengths_of('sentences', SAMPLES))}", *given.settings)
        for number in range(given.rounds):
            for loops in loads:
                with busy_loops(loops):
                    for kind in draw.sample([DEFAULT, CHOSEN], 2):
                        run = folder / f"{kind}-{loops}-{number}"
                        each = trained(kind, given.threads, given.steps, settings, run)
                        found[loops][kind].append(each)
                        say(f"{number + 1}, {loops} loops, {kind}: {each.tokens_per_s:,.0f} tokens/s; {each.openmp}")
    report(given, "busy", {"Trainer": [row(loops, of) for loops, of in found.items()]})
    return 0
