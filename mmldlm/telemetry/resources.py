"""Memory of this process, the host and the CUDA device in MiB."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

MIB = 2**20
_MEMINFO, _SELF_CGROUP, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def resident_mib() -> float:
    """Return the resident memory of this process; its peak if the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def host_memory_mib() -> tuple[float, float] | None:
    """Return (limit, free) of the host: the memory for all processes here, and how much of it is still available.

    The limit is that of the control groups, if they have one. File caches count as free. None if the system has no
    /proc.
    """
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        meminfo = {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines)}
        tightest = (meminfo["MemTotal"], meminfo["MemAvailable"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for limit, free in _cgroups():
        if limit < tightest[0]:  # "no limit" is a huge number
            tightest = (limit, min(free, tightest[1]))
    return tightest


def _cgroups() -> Iterator[tuple[float, float]]:
    """Yield (limit, free) of this process's control groups and their parents, versions 1 and 2."""
    try:
        lines = _SELF_CGROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            root, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # The limit of a parent holds for its children, which need not have one of their own.
        for group in (folder, *folder.parents):
            yield from _cgroup_memory(group, *names)
            if group == root:
                break


def _cgroup_memory(folder: Path, limit: str, used: str, cache: str) -> Iterator[tuple[float, float]]:
    """Yield (limit, free) of one control group from its files `limit`, `used` and memory.stat; nothing if unlimited."""
    try:
        limit_mib = int((folder / limit).read_text()) / MIB
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used_mib = int((folder / used).read_text()) / MIB - int(stat[cache]) / MIB
    except (OSError, ValueError, KeyError):  # "max", or a group that is not visible here
        return
    yield limit_mib, max(0.0, limit_mib - used_mib)


def cuda_in_use() -> bool:
    """Return whether this process uses CUDA; it is not initialized for this, since that would create a context."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def cuda_memory_metrics() -> dict[str, float]:
    """Return what PyTorch's allocator has done on the current CUDA device, and start new peaks.

    Peaks are those since the last call: between two steps activations are freed, so the current numbers do not show how
    near the limit a run is. Retries (of allocations, after freeing cached memory) and failures count from the start.
    """
    stats = torch.cuda.memory_stats()
    values = {
        "memory/cuda_allocated_mib": torch.cuda.memory_allocated() / MIB,
        "memory/cuda_reserved_mib": torch.cuda.memory_reserved() / MIB,
        "memory/cuda_peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
        "memory/cuda_peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
        "health/cuda_alloc_retries": stats.get("num_alloc_retries", 0),
        "health/cuda_ooms": stats.get("num_ooms", 0),
    }
    torch.cuda.reset_peak_memory_stats()
    return values


def free_memory_mib(device: torch.device, processes: int = 1) -> float:
    """Return the memory that this process, one of `processes` on the host, may still allocate on `device`."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + cached) / MIB
    host = host_memory_mib()
    free = (psutil.virtual_memory().available / MIB if host is None else host[1]) / processes
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
    if limit == resource.RLIM_INFINITY:
        return free
    return min(free, max(0, limit - psutil.Process().memory_info().vms) / MIB)


def memory_limits() -> dict[str, float]:
    """Return the total memory of the host, and of the CUDA device if one is in use, for the start-up report."""
    limits = {}
    if (host := host_memory_mib()) is not None:
        limits["host_memory_mib"] = host[0]
    if cuda_in_use():
        limits["device_memory_mib"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / MIB
    return limits


def memory_metrics() -> dict[str, float]:
    """Return the memory of a training record; on CUDA its peaks since the last call."""
    values = {"memory/resident_mib": resident_mib()}
    if (host := host_memory_mib()) is not None:
        values["memory/host_free_mib"] = host[1]
    return values | cuda_memory_metrics() if cuda_in_use() else values
