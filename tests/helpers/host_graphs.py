"""A stand-in for CUDA graphs on a CPU: operators are recorded with their tensors, and repeated into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Results = tuple[Tensor, ...]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), "the host waits"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class HostGraphs:
    """In place of `CudaGraphs`. What Python computes is a constant of a recording, and tensors are its addresses.

    Attributes:
        kept: Returns the tensors that recorded functions change, for recording does not execute.
        counts: Numbers of ordinary passes, recordings and replays.
        fails: Whether recording raises, as CUDA does where an operation must not be recorded.
    """

    def __init__(self, kept: Callable[[], list[Tensor]]):
        self.kept, self.fails = kept, False
        self.counts = {"run": 0, "recorded": 0, "replayed": 0}

    def run(self, function: Callable[[], Results]) -> Results:
        self.counts["run"] += 1
        return function()

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        self.counts["recorded"] += 1
        before = [tensor.clone() for tensor in self.kept()]
        with _Recorder() as recorder:
            results = function()
        torch._foreach_copy_(self.kept(), before)

        @torch.no_grad()
        def replay() -> Results:
            self.counts["replayed"] += 1
            for func, args, kwargs, out in recorder.calls:
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return tuple(result.clone() for result in results)

        return replay
