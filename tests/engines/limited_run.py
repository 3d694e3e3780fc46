"""`mmldlm.train`, in which rank LIMITED may take MIB MiB more memory than it has once the run is open.

A step may take SLACK MiB more than its rehearsal: the heap is in pieces, and the more so the longer it runs.

FACTS=folder: each rank writes how often it rehearsed, with which numbers of samples.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from mmldlm import train
from mmldlm.micro_batch import AutoMicroBatch
from mmldlm.training import Training

RANK = int(os.environ.get("RANK", "0"))
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
BLOCK = 1 << 16
libc = ctypes.CDLL(None)  # memory that is freed goes back at once, so that the limit is one of what is held
assert libc.mallopt(M_ARENA_MAX, 1) and libc.mallopt(M_MMAP_THRESHOLD, BLOCK)
libc.malloc.restype = ctypes.c_void_p
SLACK = 12
rehearsed: list[int] = []
limit: int | None = None
_open, _rehearse = Training._open, AutoMicroBatch._rehearse


def held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def opened(self: Training) -> None:
    global limit
    _open(self)
    if int(os.environ.get("LIMITED", "-1")) != RANK:
        return
    threading.stack_size(1 << 20)  # threads to come take theirs from what is left, however little of it they use
    used = held()
    while held() == used:  # what is free within the heap would be memory beside the limit
        assert libc.malloc(BLOCK)
    limit = used + int(os.environ["MIB"]) * 2**20
    allow(SLACK)


def allow(slack: int) -> None:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit + slack * 2**20, limit + SLACK * 2**20))


def rehearse(self: AutoMicroBatch, batch: Any, accumulating: bool) -> bool:
    rehearsed.append(len(batch.lengths))
    allow(0)
    try:
        return _rehearse(self, batch, accumulating)
    finally:
        allow(SLACK)


Training._open, AutoMicroBatch._rehearse = opened, rehearse  # type: ignore[method-assign]
status = train.main()
if "FACTS" in os.environ:
    (Path(os.environ["FACTS"]) / f"facts.rank{RANK}.json").write_text(json.dumps(rehearsed))
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
