"""Memory of the host as far as this process may use it: all of it, or what its control groups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MIB = 2**20
_MEMINFO, _OWN_GROUPS, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory_mib() -> tuple[float, float] | None:
    """(limit, free): the memory that there is for all processes here, and what of it could still be taken.

    Caches of files count as free. None where the system has no /proc.
    """
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        found = {name: int(value.split()[0]) / 1024 for name, value in (line.split(":") for line in lines)}
        tightest = (found["MemTotal"], found["MemAvailable"])
    except (OSError, ValueError, KeyError, IndexError):
        return None
    for limit, free in _groups():
        if limit < tightest[0]:  # "no limit" is a huge number
            tightest = (limit, min(free, tightest[1]))
    return tightest


def _groups() -> Iterator[tuple[float, float]]:
    """(limit, free) of the control groups around this process, versions 1 and 2."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield from _group(group, *names)
            if group == root:
                break


def _group(folder: Path, limit: str, used: str, cache: str) -> Iterator[tuple[float, float]]:
    try:
        most = int((folder / limit).read_text()) / MIB
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        held = int((folder / used).read_text()) / MIB - int(stat[cache]) / MIB
    except (OSError, ValueError, KeyError):  # "max", or no group to be seen here
        return
    yield most, max(0.0, most - held)
