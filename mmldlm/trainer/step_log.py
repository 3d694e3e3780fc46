"""`StepLog`: numbers of the finished steps, fetched from the device, counted as accepted or skipped, and logged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.collectives import PendingSum
from mmldlm.distributed.compute_time import compare_ranks
from mmldlm.distributed.engine import Engine, is_accepted
from mmldlm.model.flops import peak_flops
from mmldlm.optim.lr_schedule import Plateau, resolved_warmup
from mmldlm.telemetry.metrics import MetricsFile
from mmldlm.telemetry.resources import memory_metrics
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.setup import Components
from mmldlm.trainer.step_guard import SKIPS_FILE, Skip, StepGuard
from mmldlm.utils.cpu import CpuTimes, cores_used_by_others, cpu_times


@dataclass(frozen=True)
class StepTotals:
    """Totals of an optimizer step over all ranks, the same on each; the first access waits for their exchange.

    Attributes:
        counts: Denominators of the losses, by entry of `Objective.__call__`, followed by the values of `names` (see
            `Trainer.sync`).
        samples: Samples of the global batch.
    """

    counts: PendingSum
    names: tuple[str, ...]
    samples: int

    def __getitem__(self, name: str) -> int:
        return int(self.counts[self.names.index(name) - len(self.names)])


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    lr: float
    grad_norm: Tensor  # [], on the device: before clipping


@dataclass(frozen=True)
class _Step:
    """A finished step; its numbers are on the device until they are fetched."""

    step: int
    numbers: Tensor  # [2 + micro-batches * (1 + S)]: `norm`, `loss_scale`, `losses` and `sums`
    counts: Tensor  # float64 [micro-batches, S], on the host
    sample_ids: list[list[int]]  # by micro-batch of this rank
    tokens: int  # over all ranks, as are FLOPs and samples
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
    """Numbers of the steps, on the device until something depends on them; updates the counters of `state`.

    `end` is what is closed at the end of the run.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        components: Components,
        state: TrainState,
        tracker: Tracker,
        run_dir: Path,
        end: ExitStack,
    ):
        self.config, self.engine, self.components, self.state = config, engine, components, state
        self.tracker, self.run_dir = tracker, run_dir
        self.guard = StepGuard(config.guard, state)
        if engine.is_main:
            # A resumed run drops records after its step, since it repeats those steps.
            file = MetricsFile(run_dir / SKIPS_FILE, state.step if tracker.resumed else None)
            self.guard.file = end.enter_context(closing(file))
        self.plateau = _create_plateau(config, state)
        self.defer_fetch = engine.device.type != "cpu"  # a CPU's numbers are read without waiting
        self.pending: list[_Step] = []
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor, list[int]]] = []  # of the present step
        self._unit_scale = torch.ones((), device=engine.device)  # the loss scale without fp16
        self._norm = self._loss_scale = 1.0  # of the last step that was fetched
        name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
        peak = peak_flops(name, config.precision)
        self._peak_flops = None if peak is None else peak * engine.world_size
        self._clear()
        self.start_interval()

    def _clear(self) -> None:
        """Clear the sums over the accepted steps since the last record, and the norms of all."""
        self._norms: list[float] = []
        self._sums: Tensor | float = 0.0
        self._counts: Tensor | float = 0.0
        self._tokens = self._samples = self._steps = 0
        self._flops = 0.0

    def start_interval(self, now: CpuTimes | None = None) -> None:
        """Start the time of the next record; `now` are the CPU times if they have just been read."""
        self.data_wait_s = 0.0  # that steps have waited for their micro-batches
        self._cpu_times = now or cpu_times()
        self._start_time, self._start_compute = time.perf_counter(), self.engine.compute_timer.seconds()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from that of the steps."""
        timer = self.engine.compute_timer
        started, computed = time.perf_counter(), timer.seconds()
        yield
        # Not in a `finally`: an error in the body ends the run.
        self._start_time += time.perf_counter() - started
        self._start_compute += timer.seconds() - computed

    def add(self, loss: Tensor, sums: Tensor, batch: NoisedBatch) -> None:
        """Record the loss and the loss sums of a micro-batch of the current step."""
        self._micro_batches.append((loss, sums, batch.counts, batch.sample_ids.tolist()))

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        """Complete the current step, the `step`-th, and write a record if it is due; raise as `fetch` (collective)."""
        scale = self._unit_scale if self.engine.loss_scale is None else self.engine.loss_scale.last_scale
        losses, sums, counts, sample_ids = zip(*self._micro_batches, strict=True)
        self._micro_batches.clear()
        numbers = torch.cat([part.reshape(-1) for part in (result.grad_norm, scale, *losses, *sums)])
        tokens, latent_tokens = totals["tokens"], self.components.store.manifest.latent.tokens
        sizes = tokens, totals["masked"], totals.samples, latent_tokens, totals["pairs"]
        work = tokens, self.components.flops.step_flops(*sizes), totals.samples
        self.pending.append(_Step(step, numbers, torch.stack(counts), list(sample_ids), *work))
        config, log_due = self.config, self.config.train.is_due(step, self.config.log.every)
        # The host waits for the device only where something depends on the numbers: a record, the limit of the next
        # gradient norm, a reduction of the learning rate, the end of the run by skipped steps.
        if (
            log_due
            or not self.defer_fetch
            or config.guard.grad_norm_spike is not None
            or (self.plateau is not None and self.plateau.due(step))
            or len(self.pending) >= config.guard.max_consecutive
        ):
            self.fetch()
        if log_due:
            self._write(step, result.lr)

    def fetch(self) -> None:
        """Wait for the device, and count each step since the last call as accepted or skipped (collective).

        Call it before reading counters, curves or the guard's state. It is a `NumericalError` if a skipped step ends
        the run by the settings of `guard`.
        """
        pending, self.pending = self.pending, []
        if not pending:
            return
        with self.engine.in_collective("numbers of the last steps"):
            steps = [replace(step, numbers=step.numbers.to("cpu", torch.float64)) for step in pending]
        for step, loss in zip(steps, self._plateau_losses(steps), strict=True):
            self._norm, self._loss_scale = float(step.norm), step.loss_scale
            self._norms.append(self._norm)
            accepted = bool(is_accepted(step.norm, self.guard.norm_limit))
            if self.plateau is not None and self.plateau.uses_training_loss:
                self.plateau.observe_training_loss(step.step, loss if accepted else None)
            if not accepted:
                self._skip(step)
                continue
            # `Trainer.backward` makes the norm NaN with any non-finite loss.
            assert step.losses.isfinite().all(), f"step {step.step}: {step.losses}, but a norm of {self._norm}"
            self.guard.record_accepted(self._norm)
            self._add_accepted(step)

    def _add_accepted(self, step: _Step) -> None:
        """Count a step in the means of the next record; skipped steps enter none."""
        for micro_sums, micro_counts in zip(step.sums, step.counts, strict=True):
            self._sums = self._sums + micro_sums
            self._counts = self._counts + micro_counts
        self._tokens += step.tokens
        self._flops += step.flops
        self._samples += step.samples
        self._steps += 1
        self.state.samples_seen += step.samples
        self.state.tokens_seen += step.tokens

    def _plateau_losses(self, steps: Sequence[_Step]) -> Sequence[float | None]:
        """Return each step's training loss over all ranks if the plateau schedule needs it (collective)."""
        if self.plateau is None or not self.plateau.uses_training_loss:
            return [None] * len(steps)
        # [steps, 2, S]: sums and counts over this rank's micro-batches.
        local = torch.stack([torch.stack([step.sums.sum(0), step.counts.sum(0)]) for step in steps])
        totals = self.engine.sum(local, "all-reduce of the losses that the learning rate follows")
        return [self.components.objective.stats.summary(sums, counts)["loss/total"] for sums, counts in totals]

    def _skip(self, step: _Step) -> None:
        """Record a skipped step with the samples of all ranks; end the run if the guard says so (collective)."""
        split = self.components.store.split("train")
        pairs = zip(step.sample_ids, step.losses.tolist(), strict=True)
        records = [{"samples": split.group_by_source(ids), "loss": loss} for ids, loss in pairs]
        ranks = self.engine.gather(records, "gather of the skipped step's samples")
        skip = Skip.classify(step.step, self._norm, ranks, self._loss_scale)
        self.tracker.event("skip", skip.step, self.guard.skip(skip, ranks))
        self.guard.check(skip, self.run_dir)

    def _write(self, step: int, lr: float) -> None:
        """Write a record of the accepted steps since the last one (collective)."""
        seconds, components, state = time.perf_counter() - self._start_time, self.components, self.state
        if not self._steps:  # every step since the last record was skipped: there is no loss to log
            return
        assert isinstance(self._sums, Tensor) and isinstance(self._counts, Tensor)
        totals = self.engine.sum(torch.stack([self._sums, self._counts]), "all-reduce of the losses to log")
        batch_sizes, now = asdict(components.loader.batch_at(step - 1)), cpu_times()
        # A mixture has no common epoch.
        sources, of_sources = components.store.sources, components.loader.order.epochs(state.samples_drawn)
        epochs = {f"data/epoch/{source.name}": value for source, value in zip(sources, of_sources, strict=True)}
        values = {
            **components.objective.stats.summary(*totals),
            "optim/grad_norm": self._norm,
            **({"optim/loss_scale": self._loss_scale} if self.engine.loss_scale is not None else {}),
            "speed/tokens_per_s": self._tokens / seconds,
            "speed/samples_per_s": self._samples / seconds,
            "speed/tflops_per_s": self._flops / seconds / 1e12,
            **({"speed/mfu": self._flops / seconds / self._peak_flops} if self._peak_flops is not None else {}),
            "speed/step_s": seconds / self._steps,
            "speed/data_wait_s": self.data_wait_s / self._steps,
            "data/tokens": state.tokens_seen,
            "data/steps": self._steps,  # that the means are of: fewer after a resume, and where steps were skipped
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
        """Return how long ranks computed in a step since the last record; nothing of a single one (collective)."""
        if self.engine.world_size == 1:
            return {}
        seconds = (self.engine.compute_timer.seconds() - self._start_compute) / len(self._norms)
        by_rank = self.engine.gather_vectors(torch.tensor([seconds]), "compute times of the ranks")
        return compare_ranks(by_rank.flatten().tolist())


def _create_plateau(config: RunConfig, state: TrainState) -> Plateau | None:
    """Return the plateau schedule; clear its state under other values of `schedule.lr`."""
    if config.schedule.lr != "plateau":
        state.lr_cuts, state.plateau_best, state.plateau_since, state.plateau_losses = 0, None, 0, []
        return None
    warmup = resolved_warmup(config.optim, config.train.steps)
    return Plateau(config.schedule, state, warmup, validates=config.validation.every > 0)
