"""How long a rank computes in a step, without its waits for other ranks, which make all ranks equally slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn


class Work(NamedTuple):
    """Work of a rank, and the seconds in which it computed it; no FLOPs if nothing was measured."""

    seconds: float = 0.0
    flops: float = 0.0


class HostTimer:
    """Measures the CPU time of this thread, to which neither waits for other ranks nor those for a core count."""

    def __init__(self) -> None:
        self._started = 0.0
        self._measured = Work()

    def measured(self) -> AbstractContextManager[None]:
        """Return a context whose work counts, as all of this thread does."""
        return nullcontext()

    def start(self) -> None:
        """Start a step."""
        self._started = time.thread_time()

    def stop(self, flops: float) -> None:
        """End a step of this work."""
        self._measured = Work(time.thread_time() - self._started, flops)

    def take(self) -> Work:
        """Return the last step, once."""
        measured, self._measured = self._measured, Work()
        return measured


class DeviceTimer:
    """Measures the forward passes of blocks on a CUDA device, or what is `measured`, by events: without collectives.

    The host never waits for the device: a step is returned once the device has reached its last event. ZeRO-3 gathers
    parameters within the blocks, so there the waits for other ranks count, too.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        self._begun: list[torch.cuda.Event] = []
        self._ended: list[torch.cuda.Event] = []
        self._steps: deque[tuple[list[torch.cuda.Event], list[torch.cuda.Event], float]] = deque()
        for block in blocks:
            # Within the hooks of FSDP2, which wait for the gathered parameters.
            block.register_forward_pre_hook(lambda block, _: self._record(self._begun) if block.training else None)
            block.register_forward_hook(
                lambda block, *_: self._record(self._ended) if block.training else None, prepend=True
            )

    def _record(self, events: list[torch.cuda.Event]) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what is started on the device in this context."""
        self._record(self._begun)
        yield
        self._record(self._ended)

    def start(self) -> None:
        """Start a step; forward passes before it do not count."""
        self._begun, self._ended = [], []

    def stop(self, flops: float) -> None:
        """End a step of this work."""
        self._steps.append((self._begun, self._ended, flops))

    def take(self) -> Work:
        """Return the sum of the steps that the device has finished since the last call."""
        seconds = flops = 0.0
        while self._steps and self._steps[0][1][-1].query():
            begun, ended, step_flops = self._steps.popleft()
            seconds += sum(map(torch.cuda.Event.elapsed_time, begun, ended)) / 1000
            flops += step_flops
        return Work(seconds, flops)
