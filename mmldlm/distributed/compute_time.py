"""How long each rank computes. Waits for other ranks are left out, because they make all ranks equally slow."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class ComputeTimer:
    """Measures how long this rank computes: the CPU time of this thread or, `on_cuda`, the time of the blocks.

    On a device, CUDA events before and after each block time its forward passes in training. A block calls no
    collective, except that ZeRO-3 gathers parameters in it. The host never waits for the device.
    """

    def __init__(self, blocks: Iterable[nn.Module], on_cuda: bool):
        self._on_cuda, self._seconds = on_cuda, 0.0
        self._begun: deque[torch.cuda.Event] = deque()
        self._ended: deque[torch.cuda.Event] = deque()
        for block in blocks if on_cuda else ():
            # These hooks run inside the hooks of FSDP2, which wait for the gathered parameters.
            block.register_forward_pre_hook(lambda block, _: self._record(self._begun) if block.training else None)
            block.register_forward_hook(
                lambda block, *_: self._record(self._ended) if block.training else None, prepend=True
            )

    def _record(self, events: deque[torch.cuda.Event]) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time the work that this context starts on the device without calling a block, such as a graph replay."""
        if self._on_cuda:
            self._record(self._begun)
        yield
        if self._on_cuda:
            self._record(self._ended)

    def seconds(self) -> float:
        """Return the time computed since the start. On a device this covers the blocks that have finished."""
        if not self._on_cuda:
            return time.thread_time()
        while self._ended and self._ended[0].query():
            self._seconds += self._begun.popleft().elapsed_time(self._ended.popleft()) / 1000
        return self._seconds


def compare_ranks(seconds: Sequence[float]) -> dict[str, float]:
    """Return the slowest rank, its seconds, and the median seconds of the other ranks, as tags of a record."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    others = [*seconds[:slowest], *seconds[slowest + 1 :]]
    return {
        "speed/compute_s": statistics.median(others),
        "speed/compute_s_slowest": seconds[slowest],
        "speed/slowest_rank": slowest,
    }
