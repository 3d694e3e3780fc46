"""How busy other processes keep the CPU, and how many threads that leaves for a run."""

from __future__ import annotations

import os
import platform
import time
import timeit
from pathlib import Path
from typing import Any, NamedTuple

import torch

try:
    import psutil
except ImportError:  # not needed to sample from a bundle
    psutil = None

_LOOK_S, _MAX_LOOKS = 0.25, 8  # a short burst of load, under two seconds, does not cost the run a thread
_QUIET_CORES = 0.5  # load of others that still leaves a thread room most of the time


class CpuTimes(NamedTuple):
    """Clock and CPU times in seconds since an arbitrary moment."""

    clock: float
    busy: float  # all processes, on the CPUs that this process may use
    run: float  # the run's processes on this host


def choose_threads(saved: int = 0) -> str:
    """Give PyTorch the cores that other processes leave, in a process that computes alone, and return the reason.

    OpenMP's threads spin while they wait for each other, so one thread without a core of its own slows down all others.
    OMP_NUM_THREADS in the environment takes precedence. Next comes `saved`, the thread count of the checkpoint being
    resumed, because results depend on it to the last bit.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return "set by OMP_NUM_THREADS"
    if torch.cuda.is_available() or psutil is None:
        return "the default"
    cpus = len(_usable_cpus())
    if saved:
        torch.set_num_threads(min(saved, cpus))
        return "as in the checkpoint" if saved <= cpus else f"{saved} in the checkpoint, but there are {cpus} CPUs"
    others = float(cpus)
    for _ in range(_MAX_LOOKS):
        before = cpu_times()
        time.sleep(_LOOK_S)
        others = min(others, cores_used_by_others(before, cpu_times()))
        if others < _QUIET_CORES:
            break
    torch.set_num_threads(max(1, min(torch.get_num_threads(), round(cpus - others))))
    return f"other processes keep {others:.1f} of {cpus} CPUs busy"


def cpu_times() -> CpuTimes:
    """Return current CPU times.

    The run's processes are the launcher and its descendants. Without a launcher, they are this process and its
    descendants.
    """
    cpus = _usable_cpus()
    # User time already includes guests. Time that the hypervisor gave to others ("steal") is lost to a run, too.
    idle = ("idle", "iowait", "guest", "guest_nice")
    times = [cpu._asdict() for number, cpu in enumerate(psutil.cpu_times(percpu=True)) if number in cpus]
    busy = sum(seconds for cpu in times for name, seconds in cpu.items() if name not in idle)
    # The loop appends children to its own list. `psutil.Process.children` would read every process of the system.
    pids, run = [(os.getppid() if "LOCAL_RANK" in os.environ else 0) or os.getpid()], 0.0
    for pid in pids:
        try:
            run += sum(psutil.Process(pid).cpu_times()[:4])  # includes children that have ended
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (OSError, psutil.Error):  # the process has just ended, or the system has no /proc
            continue
    return CpuTimes(time.monotonic(), busy, run)


def cores_used_by_others(before: CpuTimes, after: CpuTimes) -> float:
    """Return the mean number of cores that processes outside the run kept busy between two measurements."""
    others_s = (after.busy - before.busy) - (after.run - before.run)
    return max(0.0, others_s / max(after.clock - before.clock, 1e-9))


def slowdown(dtype: torch.dtype) -> float:
    """Return how many times as long a matrix product takes in `dtype` as in float32 on this CPU.

    We measure it, in a few milliseconds, because a CPU's instruction set does not tell. Among CPUs with bfloat16
    instructions we saw factors of 0.5 and 2.
    """
    matrix = torch.ones(256, 256)

    def shortest_s(operand: torch.Tensor) -> float:
        return min(timeit.repeat(lambda: operand @ operand, number=1, repeat=3))

    return shortest_s(matrix.to(dtype)) / shortest_s(matrix)


def processor_name() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def hardware(device: torch.device) -> dict[str, Any]:
    """Return what decides how this process rounds sums: its device, processor and threads."""
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "processor": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def _usable_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
