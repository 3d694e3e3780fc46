"""Memory of this process, the host and the CUDA device, in MiB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

MIB = 2**20


def host_memory_mib() -> tuple[float, float]:
    """Return (limit, free): the memory that all processes of this host may use, and how much of it is available.

    Limits of control groups count as well. File caches count as free.
    """
    memory = psutil.virtual_memory()
    limit, free = memory.total / MIB, memory.available / MIB
    for group_limit, group_free in _cgroups():
        limit, free = min(limit, group_limit), min(free, group_free)
    return limit, free


def _cgroups() -> Iterator[tuple[float, float]]:
    """Yield (limit, free) of this process's control group (version 2) and of its parents: all limits hold."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for path in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        folder = Path("/sys/fs/cgroup", path)
        for group in (folder, *folder.parents):
            yield from _cgroup_memory(group)


def _cgroup_memory(group: Path) -> Iterator[tuple[float, float]]:
    """Yield (limit, free) of one control group, or nothing if it is unlimited."""
    try:
        limit = int((group / "memory.max").read_text()) / MIB
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = (int((group / "memory.current").read_text()) - int(stat["inactive_file"])) / MIB
    except (OSError, ValueError):  # the limit is "max", or the group is not visible here
        return
    yield limit, max(0.0, limit - used)


def cuda_in_use() -> bool:
    """Return whether this process uses CUDA. Asking does not initialize it, since that would create a context."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def memory_limits() -> dict[str, float]:
    """Return the total memory of the host and of a CUDA device in use, for the start-up report."""
    limits = {"host_memory_mib": host_memory_mib()[0]}
    if cuda_in_use():
        limits["device_memory_mib"] = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / MIB
    return limits


def memory_metrics() -> dict[str, float]:
    """Return the memory values of a training record. On CUDA, add counters of PyTorch's allocator and reset its peaks.

    A peak is the maximum since the last call. We need peaks because activations are freed between steps, so current
    numbers do not show how near its limit a run is. Retries (allocations that succeeded only after cached memory was
    freed) and failures count from the start.
    """
    resident = psutil.Process().memory_info().rss / MIB
    values = {"memory/resident_mib": resident, "memory/host_free_mib": host_memory_mib()[1]}
    if cuda_in_use():
        stats = torch.cuda.memory_stats()
        values |= {
            "memory/cuda_allocated_mib": torch.cuda.memory_allocated() / MIB,
            "memory/cuda_reserved_mib": torch.cuda.memory_reserved() / MIB,
            "memory/cuda_peak_allocated_mib": torch.cuda.max_memory_allocated() / MIB,
            "memory/cuda_peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB,
            "health/cuda_alloc_retries": stats.get("num_alloc_retries", 0),
            "health/cuda_ooms": stats.get("num_ooms", 0),
        }
        torch.cuda.reset_peak_memory_stats()
    return values
