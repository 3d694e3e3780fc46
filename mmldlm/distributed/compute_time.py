"""How long a rank computes in a step, without its waits for other ranks, which make all ranks equally slow."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch
from torch import nn


class Work(NamedTuple):
    """Work of a rank, and the seconds in which it computed it; no FLOPs if nothing was measured."""

    seconds: float = 0.0
    flops: float = 0.0


class ComputeTimer(Protocol):
    """Measures the steps of a rank."""

    def start(self) -> None:
        """Start a step."""

    def stop(self, flops: float) -> None:
        """End a step of this work."""

    def take(self) -> Work:
        """Return the sum of the steps whose measurements are complete, since the last call."""


class HostTimer:
    """Measures the thread that creates it: its CPU time, and the time in which it is blocked outside of `waiting`.

    On Linux, time in which the thread could run but had no core is left out: it depends on what else the host does, and
    is in `speed/cores_of_others` of a run.
    """

    def __init__(self) -> None:
        self._waited_s = self._blocked_s = self._cpu_s = 0.0
        self._measured = Work()
        self._schedstat: int | None = None  # a file, open from the first step on: most timers never measure one

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count the time in which the body is blocked, since it waits for other ranks."""
        waited_s, blocked_s = self._waited_s, self._blocked()
        yield
        # Replaces what a context within this one has added. Not in a `finally`: an error in the body ends the run.
        self._waited_s = waited_s + self._blocked() - blocked_s

    def start(self) -> None:
        """Start a step."""
        if self._schedstat is None:
            with suppress(OSError):
                self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._blocked_s, self._cpu_s = self._blocked() - self._waited_s, time.thread_time()

    def stop(self, flops: float) -> None:
        """End a step of this work."""
        blocked_s, cpu_s = self._blocked() - self._waited_s - self._blocked_s, time.thread_time() - self._cpu_s
        self._measured = Work(cpu_s + max(blocked_s, 0.0), flops)

    def take(self) -> Work:
        """Return the last step, once."""
        measured, self._measured = self._measured, Work()
        return measured

    def close(self) -> None:
        """Close the file of the system's statistics."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def _blocked(self) -> float:
        """Return the seconds in which the thread neither ran nor waited for a core, since some moment."""
        queued_s, before = self._queued(), -1.0
        seconds = 0.0
        while queued_s != before:  # again if the thread lost its core between the readings
            before, seconds = queued_s, time.perf_counter() - time.thread_time()
            queued_s = self._queued()
        return seconds - queued_s

    def _queued(self) -> float:
        """Return the seconds in which the thread waited for a core; 0 where the system does not say."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) * 1e-9


class DeviceTimer:
    """Measures the forward passes of blocks on a CUDA device, which contain no collective, by events.

    The host never waits for the device: a step is returned once the device has reached its last event. ZeRO-3 gathers
    parameters within the blocks, so there the waits for other ranks count, too.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        self._begun: list[torch.cuda.Event] = []
        self._ended: list[torch.cuda.Event] = []
        self._steps: deque[tuple[list[torch.cuda.Event], list[torch.cuda.Event], float]] = deque()
        for block in blocks:
            # Within the hooks of FSDP2, which wait for the gathered parameters.
            block.register_forward_pre_hook(lambda block, _: self._record(block, self._begun))
            block.register_forward_hook(lambda block, *_: self._record(block, self._ended), prepend=True)

    def _record(self, block: nn.Module, events: list[torch.cuda.Event]) -> None:
        if block.training:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)

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
