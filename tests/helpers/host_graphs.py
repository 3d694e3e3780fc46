"""A stand-in for CUDA graphs on a CPU: operators are recorded with their tensors, and repeated into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), "the host waits"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class HostGraph:
    """As with a CUDA graph, what Python computed is a constant, and tensors are those of the recording's addresses."""

    def __init__(self, function: Callable[[], tuple[Tensor, ...]], kept: list[Tensor]):
        before = [tensor.clone() for tensor in kept]
        with _Recorder() as recorder:
            self.results = function()
        torch._foreach_copy_(kept, before)  # recording does not execute
        self.calls = recorder.calls

    @torch.no_grad()
    def replay(self) -> tuple[Tensor, ...]:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return tuple(result.clone() for result in self.results)


class HostGraphs:
    """Records functions; `gradients` are what they change beside their results.

    Attributes:
        counts: Ordinary calls, recordings and replays.
        fails: Raise as CUDA does when an operation may not be recorded.
    """

    def __init__(self, gradients: Callable[[], list[Tensor]]):
        self.gradients, self.fails = gradients, False
        self.counts = {"run": 0, "recorded": 0, "replayed": 0}

    def run(self, function: Callable[[], T]) -> T:
        self.counts["run"] += 1
        return function()

    def record(self, function: Callable[[], tuple[Tensor, ...]]) -> HostGraph:
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.counts["recorded"] += 1
        graph = HostGraph(function, self.gradients())
        replay = graph.replay

        def counted() -> tuple[Tensor, ...]:
            self.counts["replayed"] += 1
            return replay()

        graph.replay = counted  # type: ignore[method-assign]
        return graph
