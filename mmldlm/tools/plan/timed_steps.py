"""A worker of `mmldlm plan`: times steps of several configs in one launch, or measures the memory that they take.

    torchrun --nproc_per_node N -m mmldlm.tools.plan.timed_steps JOBS OUT [--accelerate_config FILE] [--memory]

JOBS is a JSON file, a list of [name, settings]. OUT gets a line for each: its name with the seconds of the steps, or
with the peak of rank 0's memory above that before the run, in MiB, of a run that saves each step. The first config
only warms up what libraries and processes do at first use.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmldlm.config import load_config
from mmldlm.distributed.launcher import LauncherEnv, read_launcher_env
from mmldlm.errors import exit_process, run_command
from mmldlm.train import train_step
from mmldlm.trainer.trainer import Trainer

SETTINGS = (
    "log={every: 1000000, tensorboard: false}",
    "validation.every=0",
    "data.num_workers=0",
    "data.verify=sizes",
    "resume=never",
)
SAVED = "checkpoint={every_steps: 1, keep_last: 1}"
NEVER_SAVED = "checkpoint.every_steps=0"


def run_steps(settings: Sequence[str], launch: LauncherEnv) -> list[float]:
    """Train by these settings; return the seconds of each step but the first, which verifies its update."""
    seconds = []
    config = load_config(None, [*settings, *SETTINGS])
    with Trainer(config, launch) as run:
        started = time.perf_counter()
        for step, micro_batches in run.steps():
            train_step(run, step, micro_batches)
            started, before = time.perf_counter(), started
            seconds.append(started - before)
            if not config.checkpoint.every_steps:
                run.checkpointer.saved_at = run.state.step  # nor at the end
    return seconds[1:]


def _memory(settings: Sequence[str], launch: LauncherEnv) -> float:
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    before = _status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run_steps([*settings, SAVED], launch)
    return (_status_kib("VmHWM") - before) / 1024


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def run(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--accelerate_config")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args(argv)
    launch = read_launcher_env(os.environ, None, options.accelerate_config)
    jobs: list[tuple[str, list[str]]] = json.loads(options.jobs.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, options.out.open("a", encoding="utf-8") as out:
        shared = os.environ.get("PLAN_RUN_DIR", folder)  # all ranks write to one folder
        for number, (name, settings) in enumerate([("warm-up", jobs[0][1]), *jobs]):
            given = [f"run.dir={shared}/{number}", *settings]
            result: Any = _memory(given, launch) if options.memory else run_steps([*given, NEVER_SAVED], launch)
            if launch.rank == 0 and number:
                print(json.dumps([name, result]), file=out, flush=True)
    return 0


if __name__ == "__main__":
    exit_process(run_command(lambda: run(sys.argv[1:])))
