"""A real run of the quickstart with everything that happens in a run: does it make any step slower?

    python -m benchmarks real_run [--runs single ddp] [--log-every 10 1] [--steps 2200] [--against FOLDER] [--quick]

From an empty folder it prepares the quickstart's data. For each kind of run (one process with 2 threads, or DDP over 2
processes with one thread each) it trains twice: a bare run, and a run with saves, validations, figures, texts, quality
and a mirror. Both are stopped by a signal in the middle and resumed. They take turns of `TURN` steps, and the waiting
run is stopped completely, because the speed of most machines varies by more than the effect that we look for. After the
first pair it evaluates and samples. The machine must be quiet. Times are wall time.

Steps differ in tokens, and over a run also in speed for equally many tokens. So we compare each step with the same step
of the bare run, which trains on the same samples and noise. Exit code 1 if

- for a kind of event, the median step is more than 3 % slower in the `NEAR` steps after an event than before it, by
  more than chance (the lower end of a 95 % interval, bootstrapped over steps),
- the steps of the run are more than 5 % slower than the bare ones in the median, or
- the events take more than 8 % of the time from the first step to the end.

With --against, the whole run of another checkout takes the place of the bare one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.common.report import (
    RESULTS,
    ROOT,
    circumstances,
    markdown,
    plain_parser,
    positive,
    print_status,
    select_names,
    write_json,
)
from mmldlm.errors import DataError
from mmldlm.utils.files import sha256

TURN = 20  # steps
NEAR = 100  # steps before and after an event
WARM_UP = 40  # the first steps after a start do not count
AFTER_GOAL, STEADY_GOAL, SHARE_GOAL = 1.03, 1.05, 0.08
BARE = ("validation.every=0", "checkpoint.every_steps=0", "log.tensorboard=false", "log.every=1000000")
TEXT = "Return a list of the names of all files in the given directory."
Step = tuple[int, float]  # step, begin


class Run:
    """A training in two parts. After every `TURN` steps it stops, with all its threads, until its next turn.

    Args:
        kind: "single" or "ddp".
        folder: Folder of the run, of its output and of the times.
        settings: Settings.
        steps: Total steps. A signal ends the first part in the middle.
        root: The checkout whose package trains.
    """

    def __init__(self, kind: str, folder: Path, settings: Sequence[str], steps: int, root: Path = ROOT):
        folder.mkdir(parents=True)
        self.folder, self.wall_s, self.parts = folder, 0.0, list[dict[str, Any]]()
        self._stops = [steps // 2, 0]
        self._process: psutil.Popen | None = None
        self._launched = 0.0
        script = str(root / "benchmarks" / "common" / "timed_run.py")
        launcher = [sys.executable]
        if kind == "ddp":
            config_file = str(ROOT / "accelerate_configs" / "ddp.yaml")
            launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", config_file]
            launcher += ["--num_processes", "2", "--main_process_port", "0"]
        arguments = [f"run.dir={folder / 'run'}", f"train.steps={steps}", *settings]
        self._command = [*launcher, script, str(root / "configs/quickstart.yaml"), *arguments]
        threads = "2" if kind == "single" else "1"
        self._environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(root)}

    def turn(self) -> bool:
        """Train until rank 0 stops itself or the part ends. Return whether anything is left to do."""
        started = time.perf_counter()
        times, log = self.folder / f"times-{len(self._stops)}", self.folder / "log"
        process = self._process
        if process is None:
            self._launched = started
            own = {"TIMES": str(times), "STOP_AT": str(self._stops[0]), "TURN": str(TURN)}
            with log.open("ab") as file:
                process = psutil.Popen(self._command, env=self._environment | own, stdout=file, stderr=file, cwd=ROOT)
        send(process, signal.SIGCONT)
        while process.poll() is None and not is_stopped(process):
            time.sleep(0.01)
        if process.poll() is None:
            send(process, signal.SIGSTOP)
            self._process = process
        else:
            path = Path(f"{times}.0.json")
            if not path.exists() or (process.returncode and not self._stops[0]):
                raise DataError(f"a run ended with {process.returncode}; its output is in {log}")
            self.parts.append({"launched": self._launched} | json.loads(path.read_text(encoding="utf-8")))
            self._process = None
            self._stops.pop(0)
        self.wall_s += time.perf_counter() - started
        return bool(self._stops)


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants that still exist."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process and all its descendants."""
    for each in family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def is_stopped(process: psutil.Process) -> bool:
    """Return whether a process or one of its descendants has stopped itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(each.status() == psutil.STATUS_STOPPED for each in family(process))
    return False


def periods(steps: Sequence[Step]) -> dict[int, float]:
    """Return the seconds from the beginning of each step to the beginning of the next, by step."""
    return {step: later[1] - begun for (step, begun), later in pairwise(steps)}


def slowdown(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the ratio of two medians and the lower end of its 95 % interval."""
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(values, (2000, len(values))), axis=1) for values in (before, after)]
    return median(after) / median(before), float(np.quantile(medians[1] / medians[0], 0.025))


def judge(parts: Sequence[Mapping[str, Any]], bare: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare a run's steps with the bare run's steps, and steps after events with steps before.

    Returns:
        For the whole run, its row of the table, and the shares and ratios by kind of event.
    """
    near: dict[str, tuple[list[float], list[float]]] = {}  # steps before and after events, by kind
    seconds, wall_s = dict[str, float](), 0.0
    ratios: dict[int, float] = {}
    first = min(step for part in parts for _, step, _ in part["events"])
    for part, control in zip(parts, bare, strict=True):
        at = {step for _, step, _ in part["events"]}
        usual = periods(control["steps"])
        relative = {
            step: duration / usual[step]
            for step, duration in periods(part["steps"]).items()
            if step not in at and step % TURN and step in usual and step > part["steps"][0][0] + WARM_UP
        }
        ratios |= relative
        for name, step, spent in part["events"]:
            seconds[name] = seconds.get(name, 0.0) + spent
            before = [relative[other] for other in range(step - NEAR, step) if other in relative]
            after = [relative[other] for other in range(step + 1, step + 1 + NEAR) if other in relative]
            if min(len(before), len(after)) > NEAR // 2:
                for values, more in zip(near.setdefault(name, ([], [])), (before, after), strict=True):
                    values += more
        wall_s += part["ended"] - part["steps"][0][1] - part["paused"]
    slower = {name: slowdown(*values) for name, values in near.items()}
    by_event = {
        name: {
            "share": spent / wall_s,
            "after / before": slower[name][0] if name in slower else None,
            "low": slower[name][1] if name in slower else None,
            "steps after": len(near[name][1]) if name in near else 0,
        }
        for name, spent in seconds.items()
    }
    worst = max((low for _, low in slower.values()), default=0.0)
    share = sum(seconds.values()) / wall_s
    return {
        "ms a step": 1000
        * median(took for part in parts for step, took in periods(part["steps"]).items() if step % TURN),
        "run / bare": median(ratios.values()),
        "from the first event on": median(ratio for step, ratio in ratios.items() if step > first),
        "worst after / before, low": worst,
        "events": share,
        "start again, s": parts[-1]["steps"][0][1] - parts[-1]["launched"],
        "met": worst <= AFTER_GOAL and median(ratios.values()) <= STEADY_GOAL and share <= SHARE_GOAL,
        "by event": by_event,
    }


def same(first: Run, second: Run) -> bool:
    """Return whether the last checkpoints of two runs have the same weights."""
    one, other = (
        [sha256(path) for path in sorted(sorted(run.folder.glob("run/checkpoints/step-*"))[-1].glob("model*"))]
        for run in (first, second)
    )
    return one == other


def command(*arguments: str, log: Path) -> float:
    """Run `mmldlm` and return its wall seconds."""
    started = time.perf_counter()
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-m", "mmldlm.cli", *arguments], check=True, stdout=file, stderr=file, cwd=ROOT)
    return time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("real_run", __doc__ or "")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the runs, for a trial")
    parser.add_argument("--runs", nargs="+", help="some of single, ddp (all)")
    parser.add_argument("--log-every", type=positive, nargs="+", default=[10, 1], help="of each (%(default)s)")
    parser.add_argument("--steps", type=positive, default=2200, help="of each run (%(default)s)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="checkout in place of the bare run")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of real_run.json (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    kinds = select_names("--runs", options.runs, ["single", "ddp"])
    steps = options.steps // 10 if options.quick else options.steps
    every = 400 if steps >= 900 else max(1, steps // 5)  # the quickstart's own cadence of saves and validations
    rows, events, walls = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), Path(temporary, "log")
        prepare = ("prepare", "--corpus", "simple-docs", "--tokenizer", "words", "--latent-tokens", "4")
        walls["prepare"] = command(*prepare, "--on-problem", "skip", "--out", str(folder / "store"), log=log)
        for kind in kinds:
            for log_every in options.log_every:
                name = f"{kind}, log.every {log_every}"
                print_status(name)
                own = folder / name.replace(" ", "-")
                settings = (f"data.path={folder / 'store'}", *options.settings)
                happening = (
                    f"log.every={log_every}",
                    f"validation.every={every}",
                    f"validation.quality_every={2 * every}",
                    f"checkpoint.every_steps={every}",
                )
                run = Run(kind, own / "whole", (*settings, *happening, f"checkpoint.mirror={own / 'mirror'}"), steps)
                if options.against:
                    mirror = f"checkpoint.mirror={own / 'other-mirror'}"
                    bare = Run(kind, own / "other", (*settings, *happening, mirror), steps, options.against.resolve())
                else:
                    bare = Run(kind, own / "bare", (*settings, *BARE), steps)
                while any([bare.turn(), run.turn()]):
                    pass
                if not rows and not options.against:
                    walls["train"] = run.wall_s
                    walls["evaluate"] = command("evaluate", str(run.folder / "run"), log=log)
                    sample = ("sample", str(run.folder / "run"), "--mode", "l2t", "--text", TEXT, "-n", "3")
                    walls["sample"] = command(*sample, log=log)
                row = judge(run.parts, bare.parts)
                events += [{"run": name, "event": event, **numbers} for event, numbers in row.pop("by event").items()]
                if options.against:
                    row |= {"wall s": run.wall_s, "wall s of the other": bare.wall_s, "same weights": same(run, bare)}
                rows.append({"run": name, **row})
    from_nothing = [{"command": name, "wall s": seconds} for name, seconds in walls.items()]
    from_nothing.append({"command": "together", "wall s": sum(walls.values())})
    tables = {"Runs": rows, "Events": events, "From an empty folder to the samples": from_nothing}
    print("\n\n".join(f"{title}\n\n{markdown(table)}" for title, table in tables.items()))
    if not options.quick and not options.against:
        what = {"steps": steps, "every": every, "settings": options.settings}
        result = {"benchmark": "real_run", "what": what, **circumstances(torch.device("cpu")), "tables": tables}
        write_json(result, options.out, "real_run")
    return int(not all(row["met"] for row in rows))


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name."""
    return {f"real-run-{index}": markdown(table) for index, table in enumerate(result["tables"].values(), 1)}
