"""The load by other processes, and the threads that it leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from mmldlm.utils.cpu import CpuTimes, choose_threads, cores_used_by_others, cpu_times, slowdown
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.quick


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Sequence[float]], list[float]]]:
    """A host of some CPUs on which others keep so many cores busy in each look; returns the looks that are left."""
    threads = torch.get_num_threads()

    def make(cpus: int, loads: Sequence[float]) -> list[float]:
        left, now = list(loads), SimpleNamespace(clock=0.0, busy=0.0)

        def sleep(seconds: float) -> None:
            now.clock += seconds
            now.busy += seconds * left.pop(0)

        def times(percpu: bool) -> list[Any]:
            # Their time on the first CPU, beside time that does not count and that of CPUs that are not ours.
            idle = SimpleNamespace(_asdict=lambda: {"user": 0.0, "idle": now.clock, "iowait": 7.0 * now.clock})
            first = SimpleNamespace(_asdict=lambda: {"user": now.busy / 2, "steal": now.busy / 2, "guest": now.busy})
            foreign = SimpleNamespace(_asdict=lambda: {"user": 5 * now.clock})
            return [first, *([idle] * (cpus - 1)), foreign]

        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: now.clock)
        monkeypatch.setattr(psutil, "cpu_times", times)
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda process: (0.0, 0.0, 0.0, 0.0))
        torch.set_num_threads(cpus)
        return left

    yield make
    monkeypatch.undo()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("cpus", "loads", "threads"),
    [
        (2, [0.0], 2),
        (2, [0.4], 2),
        (2, [0.9] * 8, 1),
        (2, [2.0] * 8, 1),
        (2, [2.0, 1.5, 0.1], 2),  # of seconds at the start
        (2, [0.9] * 7 + [0.0], 2),
        (8, [3.0] * 8, 5),
        (8, [7.9] * 8, 1),
    ],
)
def test_threads_are_the_cores_that_the_quietest_look_leaves(
    host: Callable[[int, Sequence[float]], list[float]], cpus: int, loads: list[float], threads: int
) -> None:
    left = host(cpus, loads)
    assert choose_threads() == f"other processes keep {min(loads):.1f} of {cpus} CPUs busy"
    assert torch.get_num_threads() == threads and left == []


@pytest.mark.parametrize(
    ("saved", "threads", "reason"),
    [
        (1, 1, "as in the checkpoint"),
        (4, 4, "as in the checkpoint"),
        (9, 4, "9 in the checkpoint, but there are 4 CPUs"),
    ],
)
def test_a_resumed_run_looks_at_its_checkpoint_alone(
    host: Callable[[int, Sequence[float]], list[float]], saved: int, threads: int, reason: str
) -> None:
    host(4, [])
    assert choose_threads(saved) == reason and torch.get_num_threads() == threads


def test_the_environment_comes_first(
    host: Callable[[int, Sequence[float]], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host(4, [])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    assert choose_threads(1) == "set by OMP_NUM_THREADS" and torch.get_num_threads() == 3


def test_own_cpu_time_is_no_load() -> None:
    assert cores_used_by_others(CpuTimes(10, 100, 50), CpuTimes(12, 104, 51)) == 1.5
    assert cores_used_by_others(CpuTimes(10, 100, 50), CpuTimes(12, 101, 52)) == 0, "clocks that disagree by a tick"


def test_children_count_as_the_runs_while_they_live_and_after(tmp_path: Path) -> None:
    burn = "import time, sys\nwhile time.process_time() < 0.3: pass\nopen(sys.argv[1], 'w').close()\ntime.sleep(60)"
    before = cpu_times()
    child = subprocess.Popen([sys.executable, "-c", burn, str(tmp_path / "done")])
    try:
        wait_until((tmp_path / "done").exists, "0.3 s of CPU time")
        alive = cpu_times()
    finally:
        child.kill()
        child.wait()
    ended = cpu_times()
    # Two sums of the same floats in another order: an ended child's time comes with its parent's.
    assert alive.run - before.run > 0.25 and ended.run > alive.run - 1e-6 and alive.busy - before.busy > 0.2


def test_a_precision_without_instructions_is_measured_as_slow() -> None:
    """oneDNN may use none for bfloat16 where it is limited to AVX2."""
    command = "import torch; from mmldlm.trainer.startup_report import precision_notices as notices; "
    command += "print(*notices('bf16', 'cpu')); assert not notices('fp32', 'cpu') + notices('bf16', 'cuda')"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    times = re.search(r"bf16 take (\d+\.\d) times as long", done.stdout)
    assert times and float(times[1]) > 1.2
    assert slowdown(torch.float32) == pytest.approx(1, abs=0.9)
