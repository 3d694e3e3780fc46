"""A real run of the quickstart with everything that happens in one: is any step slower for it?

    python -m benchmarks real_run [--runs single ddp] [--log-every 10 1] [--steps 2200] [--quick]

From an empty folder it prepares the quickstart's data. For each kind of run, one process with 2 threads or DDP over 2
processes with one each, it trains bare for some hundred steps, then the whole run with saves, validations, figures,
texts, quality, a mirror, a stop by a signal and a resume, then bare again; and after the first such run it evaluates
and samples. The machine must be quiet. Times are wall time.

Samples differ in length, so a step's time is compared with what the bare steps take for as many tokens. Exit code 1 if

- the median step is more than 3 % slower in the `NEAR` steps after an event than before it, by kind of event,
- the steps of the run are more than 5 % slower than bare ones in the median, or
- the events take more than 8 % of the time from the first step to the end.
"""

from __future__ import annotations

import json
import os
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

NEAR = 60  # steps before and after an event
WARM_UP = 40  # first steps of a start, which are not counted
AFTER_GOAL, STEADY_GOAL, SHARE_GOAL = 1.03, 1.05, 0.08
BARE = ("validation.every=0", "checkpoint.every_steps=0", "log.tensorboard=false", "log.every=1000000")
TEXT = "Return a list of the names of all files in the given directory."
Step = tuple[int, int, float, float, float]  # step, tokens, begin, end of the update, end


class Run:
    """Trainings of one kind.

    Args:
        kind: "single" or "ddp".
        folder: Folder of the runs; its parent has the store.
        settings: Settings of all of them.
    """

    def __init__(self, kind: str, folder: Path, settings: Sequence[str]):
        self.kind, self.folder = kind, folder
        self.settings = [f"data.path={folder.parent / 'store'}", *settings]
        folder.mkdir()

    def train(self, name: str, *settings: str, stop_at: int = 0) -> dict[str, Any]:
        """Train into `name`; return what rank 0 timed, with the wall seconds of the command."""
        times, log = self.folder / f"{name}-{time.monotonic_ns()}", self.folder / f"{name}.log"
        script = str(ROOT / "benchmarks" / "common" / "timed_run.py")
        launcher = [sys.executable]
        if self.kind == "ddp":
            config_file = str(ROOT / "accelerate_configs" / "ddp.yaml")
            launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", config_file]
            launcher += ["--num_processes", "2", "--main_process_port", "0"]
        threads = {"OMP_NUM_THREADS": "2" if self.kind == "single" else "1"}
        arguments = [str(ROOT / "configs/quickstart.yaml"), f"run.dir={self.folder / name}", *self.settings, *settings]
        environment = os.environ | threads | {"PYTHONPATH": str(ROOT), "TIMES": str(times), "STOP_AT": str(stop_at)}
        started = time.perf_counter()
        with log.open("ab") as file:
            done = subprocess.run([*launcher, script, *arguments], env=environment, stdout=file, stderr=file, cwd=ROOT)
        path = Path(f"{times}.0.json")
        if not path.exists() or (done.returncode and not stop_at):
            raise DataError(f"the run {name} ended with {done.returncode}; its output is in {log}")
        return {"wall_s": time.perf_counter() - started} | json.loads(path.read_text(encoding="utf-8"))


def periods(steps: Sequence[Step]) -> dict[int, tuple[int, float]]:
    """Return tokens and seconds of each step, from its beginning to that of the next, by step."""
    return {step: (tokens, later[2] - begun) for (step, tokens, begun, *_), later in pairwise(steps)}


def usual_seconds(bare: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Fit the seconds of bare steps as a line over their tokens."""
    rows = [row for run in bare for step, row in periods(run["steps"]).items() if step > WARM_UP]
    tokens, seconds = np.array(rows).T
    usual = seconds < np.quantile(seconds, 0.95)  # the rest were disturbed
    return np.polyfit(tokens[usual], seconds[usual], 1)


def judge(parts: Sequence[Mapping[str, Any]], bare: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the steps of a run's starts with bare ones, and those after events with those before.

    Returns:
        Of the whole run: its row of the table, and the shares and ratios by kind of event.
    """
    line, slower, seconds, wall_s = usual_seconds(bare), dict[str, list[float]](), dict[str, float](), 0.0
    ratios: list[float] = []
    for part in parts:
        at = {step: name for name, step, _ in part["events"]}
        relative = {
            step: duration / float(np.polyval(line, tokens))
            for step, (tokens, duration) in periods(part["steps"]).items()
            if step not in at and step > part["steps"][0][0] + WARM_UP
        }
        ratios += relative.values()
        for name, step, spent in part["events"]:
            seconds[name] = seconds.get(name, 0.0) + spent
            before = [relative[near] for near in range(step - NEAR, step) if near in relative]
            after = [relative[near] for near in range(step + 1, step + 1 + NEAR) if near in relative]
            if min(len(before), len(after)) > NEAR // 2:
                slower.setdefault(name, []).append(median(after) / median(before))
        wall_s += part["ended"] - part["steps"][0][2]
    by_event = {
        name: {"share": spent / wall_s, "after / before": median(slower[name]) if name in slower else None}
        for name, spent in seconds.items()
    }
    worst = max((row["after / before"] or 0.0 for row in by_event.values()), default=0.0)
    share = sum(seconds.values()) / wall_s
    return {
        "ms a step": 1000 * median(duration for part in parts for _, duration in periods(part["steps"]).values()),
        "run / bare": median(ratios),
        "worst after / before": worst,
        "events": share,
        "start again, s": parts[-1]["steps"][0][2] - parts[0]["ended"],
        "met": worst <= AFTER_GOAL and median(ratios) <= STEADY_GOAL and share <= SHARE_GOAL,
        "by event": by_event,
    }


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
    parser.add_argument("--bare-steps", type=positive, default=240, help="before and after each run (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of real_run.json (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    kinds = select_names("--runs", options.runs, ["single", "ddp"])
    steps = options.steps // 10 if options.quick else options.steps
    every = max(1, steps // 5)
    rows, events, walls = [], [], dict[str, float]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), Path(temporary, "log")
        prepare = ("prepare", "--corpus", "simple-docs", "--tokenizer", "words", "--latent-tokens", "4")
        walls["prepare"] = command(*prepare, "--on-problem", "skip", "--out", str(folder / "store"), log=log)
        for kind in kinds:
            for log_every in options.log_every:
                name = f"{kind}, log.every {log_every}"
                print_status(name)
                run = Run(kind, folder / name.replace(" ", "-"), options.settings)
                bare = [run.train("bare-1", *BARE, f"train.steps={options.bare_steps}")]
                happening = (
                    f"train.steps={steps}",
                    f"log.every={log_every}",
                    f"validation.every={every}",
                    f"validation.quality_every={2 * every}",
                    f"checkpoint.every_steps={every}",
                    f"checkpoint.mirror={run.folder / 'mirror'}",
                )
                parts = [run.train("run", *happening, stop_at=steps // 2), run.train("run", *happening)]
                if not rows:
                    walls["train"] = sum(part["wall_s"] for part in parts)
                    walls["evaluate"] = command("evaluate", str(run.folder / "run"), log=log)
                    sample = ("sample", str(run.folder / "run"), "--mode", "l2t", "--text", TEXT, "-n", "3")
                    walls["sample"] = command(*sample, log=log)
                bare.append(run.train("bare-2", *BARE, f"train.steps={options.bare_steps}"))
                row = judge(parts, bare)
                events += [{"run": name, "event": event, **numbers} for event, numbers in row.pop("by event").items()]
                rows.append({"run": name, **row})
    from_nothing = [{"command": name, "wall s": seconds} for name, seconds in walls.items()]
    from_nothing.append({"command": "together", "wall s": sum(walls.values())})
    tables = {"Runs": rows, "Events": events, "From an empty folder to the samples": from_nothing}
    print("\n\n".join(f"{title}\n\n{markdown(table)}" for title, table in tables.items()))
    if not options.quick:
        what = {"steps": steps, "every": every, "settings": options.settings}
        result = {"benchmark": "real_run", "what": what, **circumstances(torch.device("cpu")), "tables": tables}
        write_json(result, options.out, "real_run")
    return int(not all(row["met"] for row in rows))


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name."""
    return {f"real-run-{index}": markdown(table) for index, table in enumerate(result["tables"].values(), 1)}
