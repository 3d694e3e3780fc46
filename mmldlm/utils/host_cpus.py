"""CPU load of other processes, and how long OpenMP threads spin under such load.

A spinning thread resumes at once when the threads that it waits for are done. When other processes occupy cores, it may
block the core that one of those threads needs. libgomp reads GOMP_SPINCOUNT once, when torch is imported, so this
module does not import torch.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

SPIN_CHOICE_ENV = "MMLDLM_OPENMP"  # environment variable with the choice and its reason
SHORT_SPIN = "1000"
OPENMP_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
_MAX_SAMPLES, _SAMPLE_S = 3, 0.08
_MIN_BUSY_CORES = 0.5  # cores that others must occupy beyond the spare ones before short spinning pays

Sample = Callable[[], float | None]  # measures the cores that other processes keep busy; None if unknown


@dataclass(frozen=True)
class CpuTimes:
    """Clock and CPU times in seconds since an arbitrary moment."""

    clock: float
    busy: float  # CPU time of all processes, on the CPUs that this process may use
    run: float  # CPU time of the run's processes on this host


def configure_openmp_spinning(environment: MutableMapping[str, str], sample: Sample | None = None) -> None:
    """Make OpenMP threads spin only briefly if other processes occupy cores that they need.

    Sets GOMP_SPINCOUNT, and `SPIN_CHOICE_ENV` with the choice and its reason. Does nothing once torch is imported.
    Spinning settings that the environment has already are kept.

    Args:
        environment: The process's environment variables, modified in place.
        sample: Measures the load by other processes; default: from /proc/stat.
    """
    if "torch" in sys.modules:
        return
    cpus = _usable_cpus()
    threads = _num_threads(environment, cpus)
    if preset := _preset(environment):
        choice = preset
    elif threads == 1:
        choice = "a single thread, which never waits"
    else:
        # Other ranks of this host need cores as well. If ranks are bound to disjoint CPUs, none is spare either.
        spare = max(0, len(cpus) - threads * _positive_int(environment.get("LOCAL_WORLD_SIZE", ""), 1))
        others = _min_load(sample or _sample, spare + _MIN_BUSY_CORES)
        load = "unknown" if others is None else f"{others:.1f} of {len(cpus)} CPUs busy with other processes"
        if others is not None and others >= spare + _MIN_BUSY_CORES:
            environment["GOMP_SPINCOUNT"] = SHORT_SPIN
            choice = f"short spinning (GOMP_SPINCOUNT={SHORT_SPIN}), load at the start: {load}"
        else:
            choice = f"default spinning, load at the start: {load}"
    environment[SPIN_CHOICE_ENV] = choice


def openmp_spinning(environment: Mapping[str, str]) -> str:
    """Describe how OpenMP threads wait in this process, and why."""
    return environment.get(SPIN_CHOICE_ENV) or _preset(environment) or "default spinning"


def cpu_times() -> CpuTimes | None:
    """Return current CPU times; None on systems without /proc/stat."""
    cpus = _usable_cpus()
    try:
        busy = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), cpus)
    except OSError:
        return None
    return CpuTimes(time.monotonic(), busy, _run_seconds(cpus)) if cpus else None


def cores_used_by_others(before: CpuTimes, after: CpuTimes) -> float:
    """Return the mean number of cores that processes outside the run kept busy between two measurements."""
    others_s = (after.busy - before.busy) - (after.run - before.run)
    return max(0.0, others_s / max(after.clock - before.clock, 1e-9))


def busy_seconds(stat: str, cpus: Collection[int]) -> float:
    """Return the non-idle CPU time of `cpus` in seconds.

    Time that the hypervisor gave to other guests ("steal") counts as busy, since it is lost to a run in the same way.

    Args:
        stat: Content of /proc/stat.
        cpus: Indices of CPUs.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        # The line "cpu" without a number is the sum of all CPUs.
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _run_seconds(cpus: Collection[int]) -> float:
    """Return the CPU time of the run's processes that may use some of `cpus`, and of their children that have ended.

    The run's processes are this process and its descendants; under a launcher, the launcher and its descendants, which
    are the ranks of this host and their data loader workers.
    """
    # Children are appended to the list while it is iterated over.
    pids = [(os.getppid() if "LOCAL_RANK" in os.environ else 0) or os.getpid()]
    ticks = 0
    for pid in pids:
        try:
            if not os.sched_getaffinity(pid).isdisjoint(cpus):
                fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:  # the process has just ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def processor_name() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _usable_cpus() -> set[int]:
    """Return the CPUs that this process may use; empty if the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _num_threads(environment: Mapping[str, str], cpus: Collection[int]) -> int:
    """Return the number of OpenMP threads of this process: one per core, unless the environment sets it."""
    # A list has one number for each level of nested parallelism.
    return _positive_int(environment.get("OMP_NUM_THREADS", "").split(",")[0], len({_core(cpu) for cpu in cpus}))


def _core(cpu: int) -> str:
    """Return an identifier of the physical core of a CPU, the same for all its hardware threads."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _positive_int(text: str, default: int) -> int:
    """Return `text` as a positive integer; `default` for anything else."""
    return int(text) if text.strip().isdigit() and int(text) else default


def _preset(environment: Mapping[str, str]) -> str:
    """Return the spinning settings that the environment has; "" if there are none."""
    settings = [f"{name}={environment[name]}" for name in OPENMP_SETTINGS if environment.get(name)]
    return f"{', '.join(settings)}, set by the environment" if settings else ""


def _min_load(sample: Sample, threshold: float) -> float | None:
    """Return the minimum of a few samples, stopping at the first below `threshold`: short bursts do not count."""
    loads: list[float] = []
    while len(loads) < _MAX_SAMPLES and (not loads or loads[-1] >= threshold):
        load = sample()
        if load is None:
            return None
        loads.append(load)
    return min(loads)


def _sample() -> float | None:
    before = cpu_times()
    time.sleep(_SAMPLE_S)
    after = cpu_times()
    return None if before is None or after is None else cores_used_by_others(before, after)
