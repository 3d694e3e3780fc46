"""`StepNumbers` fetches the numbers of finished steps from the device, and counts steps as accepted or skipped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.collectives import PendingSum
from mmldlm.distributed.engine import is_accepted
from mmldlm.optim.lr_schedule import Plateau, resolved_warmup
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.trainer.step_guard import SKIPS_FILE, Skip, StepGuard
from mmldlm.trainer.step_log import FinishedStep, StepLog


class StepCounts(NamedTuple):
    """Counts of one rank in a step, or their sums over all ranks."""

    tokens: int
    pairs: int  # pairs of positions that attend to each other
    masked: int
    stop: int  # number of ranks that were asked to stop
    save: int  # number of ranks that were asked to save
    ready: int  # number of ranks that have finished their part of the checkpoint in progress
    failed: int  # number of ranks that could not write their part of it


@dataclass(frozen=True)
class StepTotals:
    """Sums of a step over all ranks, the same on each rank. The first access waits for their exchange."""

    denominators: PendingSum  # [S]: the losses are divided by them, see `Objective.__call__`
    exchanged: PendingSum  # entries of `counts`
    samples: int  # in the global batch

    @cached_property
    def counts(self) -> StepCounts:
        """Counts, summed over all ranks."""
        return StepCounts(*map(int, self.exchanged))


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    lr: float
    grad_norm: Tensor  # before clipping: [], on the device


class StepNumbers:
    """Keeps the numbers of steps on the device until a record, a guard or a schedule needs them. Counts in `state`.

    Accepted and skipped steps are passed to `log`. The file of skipped steps is closed at the `end`.
    """

    def __init__(self, log: StepLog, end: ExitStack):
        components, state, tracker = log.components, log.state, log.tracker
        config, engine = components.config, components.engine
        self.config, self.engine, self.components, self.state = config, engine, components, state
        self.tracker, self.log, self.run_dir = tracker, log, Path(config.run.dir)
        file = None
        if engine.is_main:
            # A resumed run repeats later steps, so their records are dropped.
            file = MetricsFile(self.run_dir / SKIPS_FILE, state.step if tracker.resumed else None)
            end.enter_context(closing(file))
        self.guard = StepGuard(config.guard, state, file)
        self.plateau = _create_plateau(config, state)
        self.defer_fetch = engine.device.type != "cpu"  # reading numbers of a CPU needs no wait
        self.pending: list[FinishedStep] = []
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor, list[int]]] = []  # micro-batches of the present step
        self._unit_scale = torch.ones((), device=engine.device)  # the loss scale if there is no fp16

    def add(self, loss: Tensor, sums: Tensor, batch: NoisedBatch) -> None:
        """Keep loss and loss sums of a micro-batch of the current step."""
        self._micro_batches.append((loss, sums, batch.counts, batch.sample_ids.tolist()))

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        """Complete the current step, and fetch numbers if something depends on them (collective). Raises as `fetch`."""
        scale = self._unit_scale if self.engine.loss_scale is None else self.engine.loss_scale.last_scale
        losses, sums, counts, sample_ids = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        numbers = torch.cat([part.reshape(-1) for part in (result.grad_norm, scale, *losses, *sums)])
        total, latent_tokens = totals.counts, self.components.store.manifest.latent.tokens
        flops = self.components.flops.step_flops(total.tokens, total.masked, totals.samples, latent_tokens, total.pairs)
        work = total.tokens, flops, totals.samples
        self.pending.append(FinishedStep(step, numbers, torch.stack(counts), list(sample_ids), *work))
        guard = self.config.guard
        # The host waits for the device only if something depends on the numbers: the limit of the next gradient norm, a
        # cut of the learning rate, or the end of the run by skipped steps. For records, `Trainer.end_step` fetches.
        if (
            not self.defer_fetch
            or guard.grad_norm_spike is not None
            or (self.plateau is not None and self.plateau.due(step))
            or len(self.pending) >= guard.max_consecutive
        ):
            self.fetch()

    def fetch(self) -> None:
        """Wait for the device, and count each step since the last call as accepted or skipped (collective).

        Call this before you read counters, curves or the guard's state. Raise `NumericalError` if a skipped step ends
        the run by the settings of `guard`.
        """
        pending, self.pending = self.pending, []
        if not pending:
            return
        with self.engine.in_collective("numbers of the last steps"):
            steps = [replace(step, numbers=step.numbers.to("cpu", torch.float64)) for step in pending]
        for step, loss in zip(steps, self._plateau_losses(steps), strict=True):
            accepted = bool(is_accepted(step.norm, self.guard.norm_limit))
            if self.plateau is not None and self.plateau.uses_training_loss:
                self.plateau.observe_training_loss(step.step, loss if accepted else None)
            self.log.count(step, accepted)
            if not accepted:
                self._skip(step)
                continue
            # `Trainer.backward` makes the norm NaN with any non-finite loss.
            assert step.losses.isfinite().all(), f"step {step.step}: {step.losses}, but a norm of {float(step.norm)}"
            self.guard.record_accepted(float(step.norm))
            self.state.samples_seen += step.samples
            self.state.tokens_seen += step.tokens

    def _plateau_losses(self, steps: Sequence[FinishedStep]) -> Sequence[float | None]:
        """Return each step's training loss over all ranks if the plateau schedule needs it (collective)."""
        if self.plateau is None or not self.plateau.uses_training_loss:
            return [None] * len(steps)
        # Sums and counts over this rank's micro-batches: [steps, 2, S].
        local = torch.stack([torch.stack([step.sums.sum(0), step.counts.sum(0)]) for step in steps])
        totals = self.engine.sum(local, "all-reduce of the losses that the learning rate follows")
        return [self.components.objective.stats.summary(sums, counts)["loss/total"] for sums, counts in totals]

    def _skip(self, step: FinishedStep) -> None:
        """Record a skipped step with the samples of all ranks. End the run if the guard says so (collective)."""
        split = self.components.store.split("train")
        pairs = zip(step.sample_ids, step.losses.tolist(), strict=True)
        records = [{"samples": split.group_by_source(ids), "loss": loss} for ids, loss in pairs]
        ranks = self.engine.gather(records, "gather of the skipped step's samples")
        skip = Skip.classify(step.step, float(step.norm), ranks, step.loss_scale)
        self.tracker.event("skip", skip.step, self.guard.skip(skip, ranks))
        self.guard.check(skip, self.run_dir)


def _create_plateau(config: RunConfig, state: TrainState) -> Plateau | None:
    """Return the plateau schedule if `schedule.lr` asks for it. Otherwise clear its state."""
    if config.schedule.lr != "plateau":
        state.lr_cuts, state.plateau_best, state.plateau_since, state.plateau_losses = 0, None, 0, []
        return None
    warmup = resolved_warmup(config.optim, config.train.steps)
    return Plateau(config.schedule, state, warmup, validates=config.validation.every > 0)
