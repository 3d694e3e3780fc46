"""Memory of this process in MiB, and CPU load of other processes."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from mmldlm.telemetry.host_memory import MIB, host_memory_mib
from mmldlm.utils.host_cpus import CpuTimes, cores_used_by_others, cpu_times


def resident_mib() -> float:
    """Return the resident memory of this process; its peak if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def cuda_memory_mib() -> tuple[float, float] | None:
    """Return the memory (allocated, reserved) by PyTorch on the current CUDA device; None if CUDA is not in use.

    CUDA is not initialized for this: a query alone would create a context.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB


def memory_limits() -> dict[str, float]:
    """Return the total memory of the host, and of the CUDA device if one is in use, for the start-up report."""
    limits = {}
    if (host := host_memory_mib()) is not None:
        limits["host_memory_mib"] = host[0]
    if cuda_memory_mib() is not None:
        limits["device_memory_mib"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / MIB
    return limits


def memory_metrics() -> dict[str, float]:
    """Return the `memory/` group of a training record."""
    values = {"memory/resident_mib": resident_mib()}
    if (host := host_memory_mib()) is not None:
        values["memory/host_free_mib"] = host[1]
    if (cuda := cuda_memory_mib()) is not None:
        values["memory/cuda_allocated_mib"], values["memory/cuda_reserved_mib"] = cuda
    return values


def cpu_load_metrics(since: CpuTimes | None) -> dict[str, float]:
    """Return the cores of this host that processes outside the run kept busy; empty if the system has no numbers."""
    now = cpu_times()
    return {} if since is None or now is None else {"speed/cores_of_others": cores_used_by_others(since, now)}
