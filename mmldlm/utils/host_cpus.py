"""CPU time that other processes take from a run, and how long OpenMP's threads spin beside them.

A spinning thread goes on at once when the others are there. Where other processes have taken cores, it keeps one from
the very thread that it waits for. libgomp reads GOMP_SPINCOUNT once, when torch is imported, so this imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

CHOICE = "MMLDLM_OPENMP"  # in the environment: what was chosen, and why
SHORT_SPIN = "1000"
OPENMP_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
_SAMPLES, _SAMPLE_S = 3, 0.08
_TAKEN = 0.5  # cores that others may take before short spinning pays

Sample = Callable[[], float | None]  # cores that other processes keep busy; None where nobody can say


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since any one moment."""

    clock: float
    busy: float  # CPU time of all processes, on the CPUs that this one may use
    own: float  # CPU time of the run's processes on this host


def choose_spinning(environment: MutableMapping[str, str], sample: Sample | None = None) -> None:
    """Have OpenMP spin shortly where other processes take cores that its threads need; tell why in `environment`.

    Does nothing once torch is imported. What the environment says by itself stays.
    """
    if "torch" in sys.modules:
        return
    cpus = _usable_cpus()
    threads = _threads(environment, cpus)
    if named := _named(environment):
        choice = named
    elif threads == 1:
        choice = "a single thread, which waits for none"
    else:
        # Other ranks of this host need cores as well; where they have CPUs of their own, none is spare here either.
        spare = max(0, len(cpus) - threads * _number(environment.get("LOCAL_WORLD_SIZE", ""), 1))
        others = _least(sample or _sample, spare + _TAKEN)
        load = "unknown" if others is None else f"{others:.1f} of {len(cpus)} CPUs busy with other processes"
        if others is not None and others >= spare + _TAKEN:
            environment["GOMP_SPINCOUNT"] = SHORT_SPIN
            choice = f"short spinning (GOMP_SPINCOUNT={SHORT_SPIN}), load at the start: {load}"
        else:
            choice = f"default spinning, load at the start: {load}"
    environment[CHOICE] = choice


def spinning(environment: Mapping[str, str]) -> str:
    """How OpenMP's threads wait in this process, and why."""
    return environment.get(CHOICE) or _named(environment) or "default spinning"


def cpu_times() -> CpuTimes | None:
    """CPU times of this moment; None on systems without /proc/stat."""
    cpus = _usable_cpus()
    try:
        busy = busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), cpus)
    except OSError:
        return None
    return CpuTimes(time.monotonic(), busy, _run_seconds(cpus)) if cpus else None


def cores_of_others(before: CpuTimes, after: CpuTimes) -> float:
    """Cores that processes which are not of the run kept busy between the two, in the mean."""
    taken = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, taken / max(after.clock - before.clock, 1e-9))


def busy_seconds(stat: str, cpus: Collection[int]) -> float:
    """CPU time that was not idle on `cpus`, of the content of /proc/stat.

    Time that a hypervisor gave to other guests ("steal") is among it: it is lost to a run in the same way.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, fields)
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def _run_seconds(cpus: Collection[int]) -> float:
    """CPU time of the run's processes that may use some of `cpus`, and of their children that have ended.

    They are this process and its descendants; under a launcher, the launcher and its descendants, which are the ranks
    of this host and their loader processes.
    """
    # The list grows while it is walked through.
    pids = [(os.getppid() if "LOCAL_RANK" in os.environ else 0) or os.getpid()]
    ticks = 0
    for pid in pids:
        try:
            if not os.sched_getaffinity(pid).isdisjoint(cpus):
                fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:  # it has just ended
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _usable_cpus() -> set[int]:
    """CPUs that this process may use; none on systems that do not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _threads(environment: Mapping[str, str], cpus: Collection[int]) -> int:
    """OpenMP's threads of this process: as many as there are cores, unless the environment says otherwise."""
    return _number(environment.get("OMP_NUM_THREADS", "").split(",")[0], len({_core(cpu) for cpu in cpus}))


def _core(cpu: int) -> str:
    """The core of a CPU, which it may share with others."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _number(text: str, default: int) -> int:
    """A whole number above 0; `default` for anything else."""
    return int(text) if text.strip().isdigit() and int(text) else default


def _named(environment: Mapping[str, str]) -> str:
    """Settings that the user made for OpenMP's waiting; "" where there are none."""
    named = [f"{name}={environment[name]}" for name in OPENMP_SETTINGS if environment.get(name)]
    return f"{', '.join(named)}, set by the environment" if named else ""


def _least(sample: Sample, enough: float) -> float | None:
    """The least of a few samples, of which one below `enough` will do: what passes soon is no load."""
    found: list[float] = []
    while len(found) < _SAMPLES and (not found or found[-1] >= enough):
        others = sample()
        if others is None:
            return None
        found.append(others)
    return min(found)


def _sample() -> float | None:
    before = cpu_times()
    time.sleep(_SAMPLE_S)
    after = cpu_times()
    return None if before is None or after is None else cores_of_others(before, after)
