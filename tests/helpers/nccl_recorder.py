"""A stand-in for NCCL's flight recorder, which builds for a CPU lack, in the format of torch's."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch


def entry(name: str, number: int, state: str = "scheduled", **changes: Any) -> dict[str, Any]:
    """Return a collective as a flight recorder describes it."""
    finished = state == "completed"
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "is_p2p": False,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024]],
        "output_dtypes": ["Float"],
        "retired": finished,
        "state": state,
        "time_created_ns": time.time_ns(),
        **changes,
    }


def dump(*entries: dict[str, Any], completed: int = 0, enqueued: int = 0) -> dict[str, Any]:
    """Return a dump of these collectives, with the counters of their group."""
    status = {
        "last_completed_collective": str(completed),
        "last_enqueued_collective": str(enqueued),
        "last_started_collective": "-1",
    }
    return {"version": "2.10", "pg_status": {"0": status}, "entries": list(entries)}


@dataclass
class FakeNCCLRecorder:
    """Reports one pending all-reduce, with a part of an earlier coalesced collective, which never has a state.

    Attributes:
        progresses: Whether NCCL completes a collective, and starts another, between any two readings.
        completed: Number of the last completed collective.
    """

    progresses: bool
    completed: int = 41

    def __call__(self, entries: bool, only_active: bool) -> bytes:
        """Return the dump, as `_dump_nccl_trace_json` does."""
        self.completed += self.progresses
        part = entry("nccl:all_gather_into_tensor_coalesced", 7)
        last, pending = entry("nccl:all_reduce", self.completed, "completed"), self.completed + 1
        result = dump(
            part, last, entry("nccl:all_reduce", pending), completed=self.completed, enqueued=self.completed + 1
        )
        if not entries:
            del result["entries"]
        return json.dumps(result).encode()

    def install(self) -> None:
        """Put the recorder where torch has it in builds for CUDA."""
        torch._C._distributed_c10d._dump_nccl_trace_json = self  # type: ignore[attr-defined]
