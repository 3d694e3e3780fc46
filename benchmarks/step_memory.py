"""Memory that a step takes above weights and optimizer state, in a process of its own.

    python -m benchmarks.step_memory VARIANT TASK    (the task as JSON; prints MiB of two kinds of step)

A first step of one short sample makes the optimizer's state. Then the peak over steps of one micro-batch is taken above
what is held before them: resident memory, which freed memory leaves at once (`ENVIRONMENT`), or what PyTorch has
allocated on the GPU. First of the middle micro-batch of an epoch by tokens, then of the largest, which decides what
fits: it has samples of the most positions only, where padding costs nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from benchmarks.results import ROOT
from benchmarks.task import Task, device
from benchmarks.variants import opened, variants
from benchmarks.workload import largest_batch, typical_batches
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
STEPS = 2
MIB = 2**20


class OutOfMemory(Exception):
    """The variant does not fit."""


def step_memory_mib(name: str, task: Task) -> tuple[float, float]:
    """(middle, largest) of the variant, measured in a process of its own; `OutOfMemory` where it does not fit."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_memory", name, task.to_json()],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        if "OutOfMemoryError" in done.stderr or done.returncode == -9:
            raise OutOfMemory(name)
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    middle, largest = done.stdout.split()[-2:]
    return float(middle), float(largest)


def _status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def _settle() -> None:
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def measure(name: str, task: Task) -> list[float]:
    torch.set_num_threads(1)
    split = Store.open(task.store).split("train")
    order = SampleOrder(split.lengths, seed=0)
    (middle,), largest = typical_batches(order, split, task.batch, 1), largest_batch(order, split, task.batch)
    rows = [middle[:1], middle, largest]
    variant = variants(task.precision, device().type)[name]
    with tempfile.TemporaryDirectory() as folder, opened(variant, task, rows, Path(folder) / "run") as run:
        run.step(0)

        def steps(kind: int) -> None:
            for step in range(kind, kind + STEPS * len(rows), len(rows)):
                run.step(step)

        return [peak_mib(partial(steps, kind)) for kind in (1, 2)]


def peak_mib(work: Callable[[], None]) -> float:
    """The most while `work` goes on, above what is held before it; in an `ENVIRONMENT` like this."""
    cuda = torch.cuda.is_available()
    _settle()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        before = _status_kib("VmRSS") * 1024
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return ((torch.cuda.max_memory_allocated() if cuda else _status_kib("VmHWM") * 1024) - before) / MIB


if __name__ == "__main__":
    print(*(f"{mib:.1f}" for mib in measure(sys.argv[1], Task.from_json(sys.argv[2]))), flush=True)
    os._exit(0)  # for the reason in mmldlm/train.py
