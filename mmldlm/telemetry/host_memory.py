"""Memory of the host that this process may use: all of it, or the limit of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MIB = 2**20
_MEMINFO, _SELF_CGROUP, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory_mib() -> tuple[float, float] | None:
    """Return (limit, free) in MiB: the memory for all processes here, and how much of it is still available.

    File caches count as free. None if the system has no /proc.
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
