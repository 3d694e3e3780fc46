"""PyTorch's flight recorders: the latest collectives of this process, and which of them are pending.

There are two recorders, one of gloo and, in builds for CUDA, one of NCCL. NCCL's calls return at once, so only its
recorder shows that a GPU waits for others, whatever the main thread does meanwhile. `FlightRecorderDetail.hpp` defines
the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mmldlm.utils.short_repr import truncate

NCCL_PREFIX = "nccl:"  # prefix of the names of NCCL's collectives
_DUMPS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
_MAX_CHARACTERS = 200  # longest description: a coalesced collective lists the sizes of many tensors

# Where NCCL's own watchdog writes its trace. torch reads the first variable, and the second as an older name.
_TRACE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_TRACE_FILE = "nccl_trace.rank"  # PyTorch appends the rank


class Stall(NamedTuple):
    """A time span during which a process group of NCCL makes no progress."""

    completed: str  # number of the group's last completed collective
    since: float  # when we first read that number, by our clock


class NCCLProgress:
    """Tell since when NCCL has completed nothing although work is pending.

    We judge progress by the counters of the groups. Single entries do not help: entries of coalesced collectives never
    complete, and reading all entries takes thousands of times as long.
    """

    def __init__(self) -> None:
        self._stalls: dict[str, Stall] = {}

    def stall(self, now: float) -> Stall | None:
        """Read the counters and return the longest stall, or None if NCCL has nothing pending. `now` is monotonic."""
        stalls: dict[str, Stall] = {}
        for group, status in _dump("nccl", entries=False).get("pg_status", {}).items():
            completed = status.get("last_completed_collective")
            if completed != status.get("last_enqueued_collective"):
                before = self._stalls.get(group, Stall("", now))
                stalls[group] = before if before.completed == completed else Stall(completed, now)
        self._stalls = stalls
        return min(stalls.values(), key=lambda stall: stall.since, default=None)


def records() -> dict[str, dict[str, Any]]:
    """Return the contents of the recorders, NCCL's first, without empty ones."""
    dumps = {name: _dump(name) for name in _DUMPS}
    return {name: dump for name, dump in dumps.items() if dump.get("entries")}


def collectives() -> list[dict[str, Any]]:
    """Return the recorded collectives of NCCL and gloo in the order of their calls."""
    entries = [entry for record in records().values() for entry in record["entries"]]
    return sorted(entries, key=itemgetter("time_created_ns"))


def pending_collectives(or_latest: bool = False) -> list[str]:
    """Describe the pending collectives, NCCL's before gloo's, each oldest first.

    With `or_latest`, describe the latest collective if none is pending. Use it after an error, because the recorder
    counts a failed gloo collective as completed.
    """
    pending = [entry for record in records().values() for entry in record["entries"] if _is_pending(entry, record)]
    described = pending or (collectives()[-1:] if or_latest else [])
    texts = (f"{e['profiling_name']} number {e['collective_seq_id']}, sizes {e['input_sizes']}" for e in described)
    return [truncate(text, _MAX_CHARACTERS) for text in texts]


def write_records(folder: Path, rank: int) -> None:
    """Write the pending collectives and both records to `flight_recorder.rankN.json`, unless there are none."""
    found = records()
    if found:
        text = json.dumps({"pending": pending_collectives(), **found})
        with suppress(OSError):
            (folder / f"flight_recorder.rank{rank}.json").write_text(text, encoding="utf-8")


def set_trace_folder(folder: Path, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL's watchdog write its trace to `folder`/nccl_trace.rankN, unless the user chose another place."""
    for name in _TRACE_VARIABLES:
        # A path with our file name comes from an earlier run in this process.
        if Path(environment.get(name, _TRACE_FILE)).name == _TRACE_FILE:
            environment[name] = str(folder.resolve() / _TRACE_FILE)


def _dump(recorder: str, entries: bool = True) -> dict[str, Any]:
    # Builds without CUDA lack the binding. A process without a group has an empty dump.
    with suppress(AttributeError, RuntimeError, ValueError):
        # The arguments say: include entries, include pending entries only.
        return json.loads(getattr(torch._C._distributed_c10d, _DUMPS[recorder])(entries, False))
    return {}


def _is_pending(entry: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether a collective is pending, judged by its own state and its group's counter."""
    if entry["retired"] or entry["state"] == "completed":
        return False
    if not entry["profiling_name"].startswith(NCCL_PREFIX) or entry["is_p2p"]:
        return True
    # A part of a coalesced collective has no state, but NCCL completes the collectives of a group in order.
    status = record["pg_status"].get(str(entry["pg_id"]), {})
    return entry["collective_seq_id"] > int(status.get("last_completed_collective", -1))
