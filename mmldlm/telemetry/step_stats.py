"""Statistics of the steps: kept on the device until they are fetched, then accumulated between two log records."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.utils.host_cpus import cpu_times


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a finished step. Until fetched, `losses`, `sums`, `norm` and `loss_scale` are on the device."""

    step: int
    norm: Tensor  # []: gradient norm before clipping
    loss_scale: Tensor  # []: in fp16, else 1
    tokens: int  # over all ranks
    flops: float  # over all ranks, see `ModelFlops`
    samples: int  # over all ranks
    sample_ids: list[list[int]]  # by micro-batch of this rank, as are all fields below
    losses: Tensor  # [micro-batches]
    sums: Tensor  # [micro-batches, S] of `Objective`
    counts: Tensor  # float64 [micro-batches, S] on the host


class StepStats:
    """Steps whose numbers are not fetched yet, and sums over the accepted steps since the last log record."""

    def __init__(self) -> None:
        self.pending: list[StepNumbers] = []
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor, list[int]]] = []
        self.clear()

    def clear(self) -> None:
        """Start a new interval between log records."""
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.tokens = self.samples = self.steps = 0
        self.flops = self.data_wait_s = 0.0
        self.cpu_times = cpu_times()
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
        """Complete the current step: its numbers are pending until `fetch`."""
        losses, sums, counts, sample_ids = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        stacked = map(torch.stack, (losses, sums, counts))
        self.pending.append(StepNumbers(step, norm, loss_scale, tokens, flops, samples, list(sample_ids), *stacked))

    def fetch(self) -> list[StepNumbers]:
        """Return the pending steps in order, on the host in float64: one transfer, a host-device synchronization."""
        steps, self.pending = self.pending, []
        parts = [part for step in steps for part in (step.norm, step.loss_scale, step.losses, step.sums)]
        sizes = [part.numel() for part in parts]
        numbers = torch.cat([part.reshape(-1) for part in parts]).to("cpu", torch.float64).split(sizes)
        fetched = []
        # Four numbers or vectors per step, in the order of `parts`.
        for step, (norm, scale, losses, sums) in zip(steps, zip(*[iter(numbers)] * 4, strict=True), strict=True):
            # `counts` were never on the device and have the shape [micro-batches, S].
            sums = sums.view_as(step.counts)
            fetched.append(replace(step, norm=norm[0], loss_scale=scale[0], losses=losses, sums=sums))
        return fetched

    def accumulate(self, numbers: StepNumbers) -> None:
        """Add a fetched step that was accepted; skipped steps enter no mean."""
        for sums, counts in zip(numbers.sums, numbers.counts, strict=True):
            self.sums = self.sums + sums
            self.counts = self.counts + counts
        self.tokens += numbers.tokens
        self.flops += numbers.flops
        self.samples += numbers.samples
        self.steps += 1
