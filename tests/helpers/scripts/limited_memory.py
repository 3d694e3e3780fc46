"""`mmldlm.train`, in which tensors of rank LIMITED may take LIMIT_MIB: PyTorch refuses what exceeds them.

Counted are the bytes of live tensors, which are the same on every machine, unlike the pages that a process has mapped.

FACTS=folder: each rank writes the most bytes that it held, and how many backward passes it ran beside the main thread.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmldlm import train
from mmldlm.errors import exit_process

RANK = int(os.environ.get("RANK", "0"))
LIMITED = int(os.environ.get("LIMITED", "-1")) == RANK
LIMIT = float(os.environ.get("LIMIT_MIB", "inf")) * 2**20 if LIMITED else float("inf")


class Allocator(TorchDispatchMode):
    """Counts the bytes of live tensors, and fails as PyTorch's allocator does when they exceed the limit."""

    held = peak = trials = 0

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.track(tensor.untyped_storage())
        return out

    def track(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        if self.held + size > LIMIT:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")
        self.known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.held -= size


allocator = Allocator()
run_thread, backward = threading.Thread.run, Tensor.backward


def run_counted(thread: threading.Thread) -> None:
    with allocator:
        run_thread(thread)


def count_trials(*arguments: Any, **options: Any) -> None:
    allocator.trials += threading.current_thread() is not threading.main_thread()
    backward(*arguments, **options)


threading.Thread.run = run_counted  # type: ignore[method-assign]
Tensor.backward = count_trials  # type: ignore[method-assign]
with allocator:
    status = train.main()
if "FACTS" in os.environ:
    facts = {"peak_mib": allocator.peak / 2**20, "trials": allocator.trials}
    (Path(os.environ["FACTS"]) / f"facts.rank{RANK}.json").write_text(json.dumps(facts))
exit_process(status)
