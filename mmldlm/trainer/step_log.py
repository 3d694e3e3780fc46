"""`StepLog`: numbers of the finished steps, fetched from the device, counted as accepted or skipped, and logged."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.engine import Engine, is_accepted
from mmldlm.model.flops import peak_flops
from mmldlm.optim.lr_schedule import Plateau, resolved_warmup
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.telemetry.rank_times import RankTimes
from mmldlm.telemetry.resources import memory_metrics
from mmldlm.telemetry.step_stats import StepNumbers, StepStats
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.setup import Components
from mmldlm.trainer.step_guard import Skip, StepGuard, micro_batch_records
from mmldlm.utils.cpu import cores_used_by_others, cpu_times


@dataclass(frozen=True)
class _Record:
    """What a record says of its step that is known without the device."""

    step: int
    seconds: float  # since the record before, as is the next
    data_wait_s: float
    values: Mapping[str, float]


class StepLog:
    """Numbers of the steps, on the device until something depends on them; updates the counters of `state`."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        components: Components,
        state: TrainState,
        tracker: Tracker,
        run_dir: Path,
        skips_file: MetricsFile | None,
        hosts: Sequence[str],
    ):
        self.config, self.engine, self.components, self.state = config, engine, components, state
        self.tracker, self.run_dir, self.hosts = tracker, run_dir, hosts
        self.guard = StepGuard(config.guard, state, skips_file)
        self.plateau = _create_plateau(config, state)
        self.stats = StepStats()
        self.rank_times = RankTimes(len(hosts)) if engine.is_main and len(hosts) > 1 else None
        self.defer_fetch = engine.device.type != "cpu"  # a CPU's numbers are read without waiting
        self._unit_scale = torch.ones((), device=engine.device)  # the loss scale without fp16
        self._norms: list[float] = []  # of all steps since the last record
        self.norm = self._loss_scale = 1.0  # of the last step that was fetched
        self._due: _Record | None = None  # not written yet, since the device had not finished its step
        name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
        self._peak_flops = peak_flops(name, config.precision)

    def add(self, loss: Tensor, sums: Tensor, batch: NoisedBatch) -> None:
        """Record the loss and the loss sums of a micro-batch of the current step."""
        self.stats.add(loss, sums, batch.counts, batch.sample_ids)

    def end_step(self, step: int, grad_norm: Tensor, tokens: int, flops: float, samples: int) -> None:
        """Complete the current step; its numbers are fetched now only if the next step depends on them.

        Args:
            step: Number of steps so far.
            grad_norm: Gradient norm before clipping: 0-d, on the device.
            tokens, flops, samples: Work of the step over all ranks.
        """
        scale = self._unit_scale if self.engine.loss_scale is None else self.engine.loss_scale.last_scale
        self.stats.end_step(step, grad_norm, scale, tokens, flops, samples)
        # The limit of the next step's gradient norm depends on the norm of this step.
        fetch_now = not self.defer_fetch or self.config.guard.grad_norm_spike is not None
        # At these steps the plateau may cut the learning rate of the next one.
        fetch_now = fetch_now or (self.plateau is not None and self.plateau.due(step))
        if self._due is not None or len(self.stats.pending) >= self.config.guard.max_consecutive:
            # All steps but this one, which the device still works on: it never waits for the host.
            self.fetch(keep=1)
        if fetch_now:
            self.fetch()

    def compare_ranks(self, step: int, work: np.ndarray) -> None:
        """Record which ranks became slow or have recovered, by seconds and FLOPs of each (see `RankTimes.add`)."""
        for rank, slow, slowdown in self.rank_times.add(work) if self.rank_times is not None else ():
            name = f"rank {rank} on {self.hosts[rank]}"
            by = f"{slowdown:.0%} slower than" if slow else "as fast again as"
            values = {"rank": rank, "host": self.hosts[rank], "slow": slow, "slowdown": slowdown}
            self.tracker.event("slow_rank", step, values, f"{name} is {by} the median of the other ranks")

    def fetch(self, keep: int = 0) -> None:
        """Fetch the steps since the last call, count each as accepted or skipped, and write what is due (collective).

        The last `keep` steps are left for the next call, since the device works on them. Without `keep`, the host waits
        for the device: call it before reading counters, curves or the guard's state.

        Raises:
            NumericalError: A skipped step ends the run by the settings of `guard`.
        """
        due, self._due = self._due, None
        if len(self.stats.pending) > keep:
            with self.engine.in_collective("numbers of the last steps"):
                steps = self.stats.fetch(keep)
            self._count(steps)
        if due is not None:
            self._write(due)

    def _count(self, steps: Sequence[StepNumbers]) -> None:
        """Count fetched steps as accepted or skipped (collective)."""
        for numbers, loss in zip(steps, self._plateau_losses(steps), strict=True):
            norm, self._loss_scale = float(numbers.norm), float(numbers.loss_scale)
            self._norms.append(norm)
            accepted = is_accepted(numbers.norm, self.guard.norm_limit)
            if self.plateau is not None and self.plateau.uses_training_loss:
                self.plateau.observe_training_loss(numbers.step, loss if accepted else None)
            if not accepted:
                self._skip(numbers, norm)
                continue
            # `propagate_nonfinite` makes the norm NaN with any non-finite loss.
            assert numbers.losses.isfinite().all(), f"step {numbers.step}: {numbers.losses}, but a norm of {norm}"
            self.guard.record_accepted(norm)
            self.stats.accumulate(numbers)
            self.state.samples_seen += numbers.samples
            self.state.tokens_seen += numbers.tokens
        self.norm = norm

    def _plateau_losses(self, steps: Sequence[StepNumbers]) -> list[float | None]:
        """Return each step's training loss over all ranks if the plateau schedule needs it (collective)."""
        if self.plateau is None or not self.plateau.uses_training_loss:
            return [None] * len(steps)
        # [steps, 2, S]: sums and counts over this rank's micro-batches.
        local = torch.stack([torch.stack([numbers.sums.sum(0), numbers.counts.sum(0)]) for numbers in steps])
        totals = self.engine.sum(local, "all-reduce of the losses that the learning rate follows")
        return [self.components.objective.stats.summary(sums, counts)["loss/total"] for sums, counts in totals]

    def _skip(self, numbers: StepNumbers, norm: float) -> None:
        """Record a skipped step with the samples of all ranks; end the run if the guard says so (collective)."""
        records = micro_batch_records(numbers, self.components.store.split("train"))
        ranks = self.engine.gather(records, "gather of the skipped step's samples")
        skip = Skip.classify(numbers.step, norm, ranks, self._loss_scale)
        self.tracker.event("skip", skip.step, self.guard.skip(skip, ranks))
        self.guard.check(skip, self.run_dir)

    def write(self, lr: float, batch_sizes: Mapping[str, int]) -> None:
        """Write a record of the steps since the last one, as soon as the device has finished them (collective)."""
        stats, samples_drawn, now = self.stats, self.state.samples_drawn, cpu_times()
        values = {
            "optim/lr": lr,
            **(self.rank_times.record() if self.rank_times is not None else {}),
            "speed/cores_of_others": cores_used_by_others(stats.cpu_times, now),
            "data/epoch": samples_drawn / len(self.components.loader.order),
            **self._epochs(samples_drawn),
            **{f"data/{name}": size for name, size in batch_sizes.items() if size},
            **memory_metrics(),
        }
        self._due = _Record(self.state.step, time.perf_counter() - stats.start_time, stats.data_wait_s, values)
        stats.start_interval(now)
        if not stats.pending:
            self.fetch()

    def _write(self, record: _Record) -> None:
        stats, components = self.stats, self.components
        seconds = record.seconds
        if not stats.steps:  # every step since the last record was skipped: there is no loss to log
            stats.start_time, stats.data_wait_s = stats.start_time - seconds, stats.data_wait_s + record.data_wait_s
            return
        assert isinstance(stats.sums, Tensor) and isinstance(stats.counts, Tensor)
        totals = self.engine.sum(torch.stack([stats.sums, stats.counts]), "all-reduce of the losses to log")
        values = {
            **components.objective.stats.summary(*totals),
            "optim/grad_norm": self.norm,
            **({"optim/loss_scale": self._loss_scale} if self.engine.loss_scale is not None else {}),
            "speed/tokens_per_s": stats.tokens / seconds,
            "speed/samples_per_s": stats.samples / seconds,
            **self._flop_rates(stats.flops / seconds),
            "speed/step_s": seconds / stats.steps,
            "speed/data_wait_s": record.data_wait_s / stats.steps,
            "data/tokens": self.state.tokens_seen,
            "data/tokens_per_step": stats.tokens / stats.steps,
            "health/skipped_steps": self.state.skipped_steps,
            **record.values,
        }
        if components.skipped_samples:
            values["data/skipped_samples"] = len(components.skipped_samples)
        self.tracker.train(record.step, {**values, "grad_norms": self._norms})
        self._norms = []
        stats.clear()

    def _flop_rates(self, flops_per_s: float) -> dict[str, float]:
        """Return the rate of useful FLOPs over all ranks, and the MFU if the peak of the device is known."""
        rates = {"speed/tflops_per_s": flops_per_s / 1e12}
        if self._peak_flops is not None:
            rates["speed/mfu"] = flops_per_s / (self._peak_flops * self.engine.world_size)
        return rates

    def _epochs(self, samples_drawn: int) -> dict[str, float]:
        """Return the epoch of each store of a mixture; a mixture has no common epoch."""
        sources = self.components.store.sources
        epochs = self.components.loader.order.epochs(samples_drawn)
        values = {f"data/epoch/{source.name}": value for source, value in zip(sources, epochs, strict=True)}
        return values if len(values) > 1 else {}


def _create_plateau(config: RunConfig, state: TrainState) -> Plateau | None:
    """Return the plateau schedule; clear its state under other values of `schedule.lr`."""
    if config.schedule.lr != "plateau":
        state.lr_cuts, state.plateau_best, state.plateau_since, state.plateau_losses = 0, None, 0, []
        return None
    warmup = resolved_warmup(config.optim, config.train.steps)
    return Plateau(config.schedule, state, warmup, validates=config.validation.every > 0)
