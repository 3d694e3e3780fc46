"""Numbers of the steps: on the device until they are fetched, then summed up between two log records."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmldlm.utils.host_cpus import cpu_times


@dataclass(frozen=True)
class StepNumbers:
    """A step that is done. Before it is fetched, `losses`, `sums`, `norm` and `loss_scale` lie on the device."""

    step: int
    norm: Tensor  # []: of the gradients, before clipping
    loss_scale: Tensor  # []: in fp16, else 1
    tokens: int  # over all ranks
    flops: float  # over all ranks, see `UsefulFlops`
    samples: int  # over all ranks
    sample_ids: list[list[int]]  # of this rank's micro-batches, as all that follows
    losses: Tensor  # [micro-batches]
    sums: Tensor  # [micro-batches, S] of `Objective`
    counts: Tensor  # float64 [micro-batches, S] on the host


class StepStats:
    """Steps whose numbers are still to be fetched; sums of those that were taken since the last log record."""

    def __init__(self) -> None:
        self.pending: list[StepNumbers] = []
        self._step: list[tuple[Tensor, Tensor, Tensor]] = []
        self.clear()

    def clear(self) -> None:
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.tokens = self.samples = self.steps = 0
        self.flops = self.data_wait_s = 0.0
        self.cpu_times = cpu_times()
        self.began = time.perf_counter()

    def add(self, loss: Tensor, sums: Tensor, counts: Tensor) -> None:
        """A micro-batch of the step at hand."""
        self._step.append((loss.detach(), sums, counts))

    def end_step(
        self,
        step: int,
        norm: Tensor,
        loss_scale: Tensor,
        tokens: int,
        flops: float,
        samples: int,
        sample_ids: list[list[int]],
    ) -> None:
        losses, sums, counts = (torch.stack(parts) for parts in zip(*self._step, strict=True))
        self._step.clear()
        self.pending.append(
            StepNumbers(step, norm, loss_scale, tokens, flops, samples, sample_ids, losses, sums, counts)
        )

    def fetch(self) -> list[StepNumbers]:
        """The steps that were waiting, in order, on the host in float64: one transfer, for which the host waits."""
        steps, self.pending = self.pending, []
        parts = [part for step in steps for part in (step.norm, step.loss_scale, step.losses, step.sums)]
        sizes = [part.numel() for part in parts]
        numbers = torch.cat([part.reshape(-1) for part in parts]).to("cpu", torch.float64).split(sizes)
        found = []
        for step, (norm, scale, losses, sums) in zip(steps, zip(*[iter(numbers)] * 4, strict=True), strict=True):
            sums = sums.view_as(step.counts)
            found.append(replace(step, norm=norm[0], loss_scale=scale[0], losses=losses, sums=sums))
        return found

    def accumulate(self, numbers: StepNumbers) -> None:
        """A fetched step that was taken: those that were skipped are no part of any mean."""
        for sums, counts in zip(numbers.sums, numbers.counts, strict=True):
            self.sums = self.sums + sums
            self.counts = self.counts + counts
        self.tokens += numbers.tokens
        self.flops += numbers.flops
        self.samples += numbers.samples
        self.steps += 1
