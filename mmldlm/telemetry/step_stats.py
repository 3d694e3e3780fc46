"""Statistics of the steps: kept on the device until they are fetched, then accumulated between two log records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.utils.cpu import CpuTimes, cpu_times


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a finished step; those that the device computed are copied to the host while it goes on."""

    step: int
    values: Tensor  # [2 + micro-batches * (1 + S)], on the host: `norm`, `loss_scale`, `losses` and `sums`
    copied: torch.cuda.Event | None  # after which `values` may be read; None: now
    tokens: int  # over all ranks
    flops: float  # over all ranks, see `ModelFlops`
    samples: int  # over all ranks
    sample_ids: list[list[int]]  # by micro-batch of this rank, as are all fields below
    counts: Tensor  # float64 [micro-batches, S] on the host

    @property
    def norm(self) -> Tensor:
        """Gradient norm before clipping: 0-d."""
        return self.values[0]

    @property
    def loss_scale(self) -> Tensor:
        """Loss scale in fp16, else 1: 0-d."""
        return self.values[1]

    @property
    def losses(self) -> Tensor:
        """Losses of the micro-batches, [micro-batches]."""
        return self.values[2 : 2 + len(self.counts)]

    @property
    def sums(self) -> Tensor:
        """Loss sums of `Objective`, [micro-batches, S]."""
        return self.values[2 + len(self.counts) :].view_as(self.counts)


class StepStats:
    """Steps whose numbers are not fetched yet, and sums over the accepted steps since the last log record."""

    def __init__(self) -> None:
        self.pending: list[StepNumbers] = []
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor, list[int]]] = []
        self.clear()
        self.start_interval()

    def clear(self) -> None:
        """Clear the sums over the steps of an interval between log records."""
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.tokens = self.samples = self.steps = 0
        self.flops = 0.0

    def start_interval(self, now: CpuTimes | None = None) -> None:
        """Start a new interval: its time, unlike its sums, is known before the device has finished its steps."""
        self.data_wait_s = 0.0
        self.cpu_times = now or cpu_times()
        self.start_time = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from the interval."""
        started = time.perf_counter()
        yield
        # Not in a `finally`: an error in the body ends the run.
        self.start_time += time.perf_counter() - started

    def add(self, loss: Tensor, sums: Tensor, counts: Tensor, sample_ids: Tensor) -> None:
        """Record a micro-batch of the current step."""
        self._micro_batches.append((loss.detach(), sums, counts, sample_ids.tolist()))

    def end_step(self, step: int, norm: Tensor, loss_scale: Tensor, tokens: int, flops: float, samples: int) -> None:
        """Complete the current step and start to copy its numbers: they are pending until `fetch`."""
        losses, sums, counts, sample_ids = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        on_device = torch.cat([part.reshape(-1) for part in (norm, loss_scale, *losses, *sums)])
        values, copied = on_device.to("cpu", non_blocking=norm.is_cuda), None  # pinned, if it does not block
        if norm.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        stacked = torch.stack(counts)
        self.pending.append(StepNumbers(step, values, copied, tokens, flops, samples, list(sample_ids), stacked))

    def fetch(self, keep: int = 0) -> list[StepNumbers]:
        """Return the pending steps but the last `keep` in order, in float64, once the device has finished them."""
        count = len(self.pending) - keep
        steps, self.pending = self.pending[:count], self.pending[count:]
        if steps and steps[-1].copied is not None:
            steps[-1].copied.synchronize()
        return [replace(step, values=step.values.double()) for step in steps]

    def accumulate(self, numbers: StepNumbers) -> None:
        """Add a fetched step that was accepted; skipped steps enter no mean."""
        for sums, counts in zip(numbers.sums, numbers.counts, strict=True):
            self.sums = self.sums + sums
            self.counts = self.counts + counts
        self.tokens += numbers.tokens
        self.flops += numbers.flops
        self.samples += numbers.samples
        self.steps += 1
