"""`StepLog` writes the training records: losses, norms and speed, as means over the steps since the last record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mmldlm.checkpoint.state import TrainState
from mmldlm.distributed.compute_time import compare_ranks
from mmldlm.model.flops import peak_flops
from mmldlm.telemetry.resources import memory_metrics
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.setup import Components
from mmldlm.utils.cpu import CpuTimes, cores_used_by_others, cpu_times


@dataclass(frozen=True)
class FinishedStep:
    """A finished step. Its numbers stay on the device until `StepNumbers.fetch`."""

    step: int
    numbers: Tensor  # [2 + micro-batches * (1 + S)]: `norm`, `loss_scale`, `losses` and `sums`
    counts: Tensor  # float64 [micro-batches, S], on the host
    sample_ids: list[list[int]]  # for each micro-batch of this rank
    tokens: int  # like FLOPs and samples, over all ranks
    flops: float
    samples: int

    @property
    def norm(self) -> Tensor:
        """Gradient norm before clipping: 0-d."""
        return self.numbers[0]

    @property
    def loss_scale(self) -> float:
        """Loss scale in fp16, else 1."""
        return float(self.numbers[1])

    @property
    def losses(self) -> Tensor:
        """Losses of the micro-batches, [micro-batches]."""
        return self.numbers[2 : 2 + len(self.counts)]

    @property
    def sums(self) -> Tensor:
        """Loss sums of `Objective`, [micro-batches, S]."""
        return self.numbers[2 + len(self.counts) :].view_as(self.counts)


class StepLog:
    """Sums losses, sizes and times of the steps since the last record, and writes the next record."""

    def __init__(self, components: Components, state: TrainState, tracker: Tracker):
        self.components, self.engine, self.state, self.tracker = components, components.engine, state, tracker
        engine = self.engine
        name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
        peak = peak_flops(name, components.config.precision)
        self._peak_flops = None if peak is None else peak * engine.world_size
        self._loss_scale = 1.0  # in the last step
        self._clear()
        self.start_interval()

    def _clear(self) -> None:
        """Clear the sums over accepted steps and the norms of all steps since the last record."""
        self._norms: list[float] = []
        self._sums, self._counts = torch.zeros(2, self.components.objective.stats.size, dtype=torch.float64)
        self._tokens = self._samples = self._steps = 0
        self._flops = 0.0

    def start_interval(self, now: CpuTimes | None = None) -> None:
        """Start the clock of the next record. Pass CPU times that have just been read as `now`."""
        self.data_wait_s = 0.0  # that steps have waited for their micro-batches
        self._cpu_times = now or cpu_times()
        self._start_time, self._start_compute = time.perf_counter(), self.engine.compute_timer.seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the context, e.g. for a validation."""
        timer = self.engine.compute_timer
        started, computed = time.perf_counter(), timer.seconds()
        yield
        # No `finally` is needed, because an error in the body ends the run.
        self._start_time += time.perf_counter() - started
        self._start_compute += timer.seconds() - computed

    def count(self, step: FinishedStep, accepted: bool) -> None:
        """Count a step, with numbers on the host, for the next record. Only accepted steps enter its means."""
        self._loss_scale = step.loss_scale
        self._norms.append(float(step.norm))
        if not accepted:
            return
        for micro_sums, micro_counts in zip(step.sums, step.counts, strict=True):
            self._sums += micro_sums
            self._counts += micro_counts
        self._tokens += step.tokens
        self._flops += step.flops
        self._samples += step.samples
        self._steps += 1

    def write(self, step: int, lr: float) -> None:
        """Write a record of the accepted steps since the last record (collective)."""
        seconds, components, state = time.perf_counter() - self._start_time, self.components, self.state
        if not self._steps:  # all steps since the last record were skipped, so there is no loss to log
            return
        totals = self.engine.sum(torch.stack([self._sums, self._counts]), "all-reduce of the losses to log")
        batch_sizes, now = asdict(components.loader.batch_at(step - 1)), cpu_times()
        # The stores of a mixture have no common epoch.
        sources, of_sources = components.store.sources, components.loader.order.epochs(state.samples_drawn)
        epochs = {f"data/epoch/{source.name}": value for source, value in zip(sources, of_sources, strict=True)}
        values = {
            **components.objective.stats.summary(*totals),
            "optim/grad_norm": self._norms[-1],
            **({"optim/loss_scale": self._loss_scale} if self.engine.loss_scale is not None else {}),
            "speed/tokens_per_s": self._tokens / seconds,
            "speed/samples_per_s": self._samples / seconds,
            "speed/tflops_per_s": self._flops / seconds / 1e12,
            **({"speed/mfu": self._flops / seconds / self._peak_flops} if self._peak_flops is not None else {}),
            "speed/step_s": seconds / self._steps,
            "speed/data_wait_s": self.data_wait_s / self._steps,
            "data/tokens": state.tokens_seen,
            "data/steps": self._steps,  # in the means: fewer after a resume and where steps were skipped
            "data/tokens_per_step": self._tokens / self._steps,
            "health/skipped_steps": state.skipped_steps,
            "optim/lr": lr,
            **self._compute_times(),
            "speed/cores_of_others": cores_used_by_others(self._cpu_times, now),
            "data/epoch": state.samples_drawn / len(components.loader.order),
            **(epochs if len(epochs) > 1 else {}),
            **{f"data/{name}": size for name, size in batch_sizes.items() if size},
            **memory_metrics(),
        }
        if components.skipped_samples:
            values["data/skipped_samples"] = len(components.skipped_samples)
        self.tracker.train(step, {**values, "grad_norms": self._norms})
        self._clear()
        self.start_interval(now)

    def _compute_times(self) -> dict[str, float]:
        """Return how long the ranks computed in a mean step, see `compare_ranks`. Empty for one rank (collective)."""
        if self.engine.world_size == 1:
            return {}
        seconds = (self.engine.compute_timer.seconds() - self._start_compute) / len(self._norms)
        by_rank = self.engine.gather_vectors(torch.tensor([seconds]), "compute times of the ranks")
        return compare_ranks(by_rank.flatten().tolist())
