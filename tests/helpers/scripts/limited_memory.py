"""`mmldlm.train`, in which rank LIMITED may take SHARE of the memory that its first trial pass takes.

That is measured, for it depends on the CPU's kernels. A step may take SLACK MiB more than its trial pass.

Under engines that plan, the limit is ROOM MiB more than what rank LIMITED has when it plans, from there on.

FACTS=folder: each rank writes how often it tried, with which numbers of samples.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.trainer.auto_batch_size import AutoMicroBatch

RANK = int(os.environ.get("RANK", "0"))
LIMITED = int(os.environ.get("LIMITED", "-1")) == RANK
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
libc = ctypes.CDLL(None)  # memory that is freed goes back at once, so that the limit is one of what is held
assert libc.mallopt(M_ARENA_MAX, 1) and libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
SLACK = 12
tried: list[int] = []
limit: int | None = None
_try_in_memory, _plan = AutoMicroBatch._try_in_memory, AutoMicroBatch.plan


def memory(kind: str) -> int:
    """Bytes: VmSize (addresses), VmRSS (pages) or VmHWM (the most pages so far)."""
    return int(re.findall(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def most_pages(action: Callable[[], object]) -> int:
    """Bytes that `action` adds at its peak."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    action()
    return memory("VmHWM") - before


def allow(slack: int) -> None:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit + slack * 2**20, limit + SLACK * 2**20))


def try_in_memory(self: AutoMicroBatch, batch: Any, accumulating: bool) -> bool:
    global limit
    if LIMITED and limit is None:
        threading.stack_size(1 << 20)  # threads to come take theirs from what is left, however little of it they use
        needed = most_pages(lambda: _try_in_memory(self, batch, accumulating))
        # What the engine takes besides is addresses without pages here.
        limit = memory("VmSize") + self.engine.comm_buffer_bytes + int(float(os.environ["SHARE"]) * needed)
    tried.append(len(batch.lengths))
    allow(0)
    try:
        return _try_in_memory(self, batch, accumulating)
    finally:
        allow(SLACK)


def plan(self: AutoMicroBatch) -> Any:
    if LIMITED and "ROOM" in os.environ:
        threading.stack_size(1 << 20)
        room = memory("VmSize") + int(os.environ["ROOM"]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    return _plan(self)


AutoMicroBatch._try_in_memory = try_in_memory  # type: ignore[method-assign]
AutoMicroBatch.plan = plan  # type: ignore[method-assign]
status = train.main()
if "FACTS" in os.environ:
    (Path(os.environ["FACTS"]) / f"facts.rank{RANK}.json").write_text(json.dumps(tried))
exit_process(status)
