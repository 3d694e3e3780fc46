"""`Trainer`: the verbs of the loop between the first step and the last; the loop itself is in `train.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch, total_counts
from mmldlm.distributed.engine import is_accepted
from mmldlm.errors import StoppedBySignal
from mmldlm.evaluation.quality import quality
from mmldlm.evaluation.validate import validation_ids, validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figures_due, quality_of, text_samples
from mmldlm.optim.ema import decay_at
from mmldlm.optim.lr_schedule import batch_scale, lr_at
from mmldlm.run.load import LoadedRun
from mmldlm.telemetry import StepNumbers, load_values, memory_values, phase
from mmldlm.trainer.lifecycle import RunContext
from mmldlm.trainer.step_guard import Skip, account, propagate_nonfinite


class Trainer(RunContext):
    """A run that is open: the verbs of its loop."""

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Steps still to do and this rank's micro-batches; ends the run at a signal, saved."""
        batches = self._read_on()
        self.meter.clear()
        while True:
            waited = time.perf_counter()
            try:
                step, micro_batches = next(batches)
            except StopIteration:
                break
            self.meter.data_wait_s += time.perf_counter() - waited
            if self.runtime.watchdog is not None:
                self.runtime.watchdog.at(step)
            if self.auto_micro_batch is not None:
                shrunk = self.auto_micro_batch.shrink(step, micro_batches)
                if shrunk is not None:
                    self.tracker.event("micro_batch", step + 1, shrunk)
                    batches = self._read_on()  # this step again, of the same samples
                    continue
            if self.config.model.dropout:  # the one draw that is not a function of (seed, step, slot)
                torch.manual_seed(hash((self.config.run.seed, step, self.runtime.rank)) % 2**63)
            with self.profiler.stepping(step + 1):
                yield step, micro_batches
            self._raise_if_stopped()
        self.save(wait=True)
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    def _read_on(self) -> Iterator[tuple[int, list[Batch]]]:
        return self.parts.loader.steps(self.state.step, self.config.train.steps, self.state.samples_drawn)

    @phase("corrupt")
    def corrupt(self, step: int, micro_batches: list[Batch]) -> tuple[list[NoisedBatch], list[float]]:
        """The step's corrupted micro-batches on the device, and their counts summed over all ranks."""
        config, self.batch_size = self.config, self.parts.loader.batch_at(step)
        weights = mode_weights_at(step, config.mode, config.mode_schedule)
        noised = [
            self.parts.objective.corrupt(
                batch,
                draw_noise(
                    batch,
                    config.run.seed,
                    step,
                    self.batch_size.global_batch_size,
                    weights,
                    config.text.sampler,
                    config.latent.sampler,
                ),
            )
            for batch in micro_batches
        ]
        # What a rank alone knows rides along, so that all ranks do the same after the same step.
        layouts = [batch.layout for batch in noised]
        work = [
            sum(layout.num_tokens for layout in layouts),
            sum(layout.num_pairs for layout in layouts),
            sum(len(batch.positions) for batch in noised),
        ]
        wishes = [
            self.signals.stop is not None,
            self.save_schedule.save_requested(),
            self.saver.ready,
            self.saver.failed,
        ]
        own = torch.cat([total_counts(noised), torch.tensor([*work, *wishes], dtype=torch.float64)])
        totals = self.runtime.sum(own, "all-reduce of the step's counts").tolist()
        counts, (tokens, pairs, masked, stop, save, ready, failed) = totals[:-7], map(int, totals[-7:])
        samples, latent_tokens = self.batch_size.global_batch_size, layouts[0].latent_tokens
        self._step_tokens = tokens
        self._step_flops = self.useful_flops.of_step(tokens, masked, samples, latent_tokens, pairs)
        self._stop_agreed, self._save_agreed = bool(stop), bool(save)
        self.log_checkpoint(self.saver.advance(ready, failed))
        on_device = [batch.to(self.runtime.device) for batch in noised]
        if not self._is_warm:
            self._is_warm = True
            self.runtime.rehearse(lambda network: self.parts.objective(network, on_device[0], counts)[0])
        return on_device, counts

    @phase("forward")
    def forward(self, batch: NoisedBatch, totals: list[float]) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the step's loss, and its detached sums for the meter."""
        return self.parts.objective(self.runtime.forward, batch, totals)

    @phase("backward")
    def backward(self, loss: Tensor) -> None:
        """A loss that is not finite makes all gradients NaN, on which no rank takes the step."""
        self.runtime.backward(propagate_nonfinite(loss))

    def learning_rate(self, step: int) -> float:
        """Of the step whose batch was corrupted last."""
        config = self.config
        scale = batch_scale(config.optim, self.batch_size.global_batch_size)
        return lr_at(step, config.train.steps, config.optim, config.schedule, scale, self.state.lr_cuts)

    @phase("update")
    def update(self, lr: float) -> Tensor:
        """The optimizer's step, and that of the weights' average, or none where the gradients' norm is not fit.

        Returns that norm, on the device.
        """
        decay = decay_at(self.state.step, self.config.ema)
        return self.runtime.update(lr, self.config.optim.clip_norm, self.guard.norm_limit, decay)

    def finish_step(self, lr: float, norm: Tensor, micro_batches: Sequence[Batch]) -> None:
        """Count the step; log, validate and save where they are due."""
        config, state = self.config, self.state
        state.step += 1
        self.tracker.step_done(state.step)
        samples, sample_ids = self.batch_size.global_batch_size, [batch.sample_ids.tolist() for batch in micro_batches]
        state.samples_drawn += samples
        scale = self._unscaled if self.runtime.loss_scale is None else self.runtime.loss_scale.last
        self.meter.end_step(state.step, norm, scale, self._step_tokens, self._step_flops, samples, sample_ids)
        # The limit of a spike follows from the norm of the step before.
        at_once = not self.defer_fetch or config.guard.grad_norm_spike is not None
        at_once = at_once or (self.plateau is not None and self.plateau.due(state.step))
        if at_once or len(self.meter.pending) >= config.guard.max_consecutive:
            self.fetch_step_stats()
        if config.train.due(state.step, config.log.every):
            self._log(lr)
        if config.train.due(state.step, config.validation.every):
            self._validate()
        if config.train.due(state.step, config.validation.quality_every):
            self._measure_quality()
        if (self.save_schedule.due(state.step) or self._save_agreed) and state.step < config.train.steps:
            self.save()

    def fetch_step_stats(self) -> None:
        """Collective: fetch the numbers of the steps since the last time, and count them as taken or as skipped.

        What the device is asked here is all that a run waits for it, so it is done late: whoever needs what follows
        from those numbers (curves, counters, the guard's verdict) settles first.
        """
        if not self.meter.pending:
            return
        with self.runtime.in_collective("numbers of the last steps"):
            steps = self.meter.fetch()
        followed = self._losses_to_follow(steps)
        for numbers, loss in zip(steps, followed, strict=True):
            norm, self._loss_scale = float(numbers.norm), float(numbers.loss_scale)
            taken = is_accepted(numbers.norm, self.guard.norm_limit)
            if self.plateau is not None and self.plateau.of_training:
                self.plateau.train(numbers.step, loss if taken else None)
            if not taken:
                self._skip(numbers, norm)
                continue
            assert numbers.losses.isfinite().all(), f"step {numbers.step}: {numbers.losses}, but a norm of {norm}"
            self.guard.record_accepted(norm)
            self.meter.accumulate(numbers)
            self.state.samples_seen += numbers.samples
            self.state.tokens_seen += numbers.tokens
        self._norm = norm

    def _losses_to_follow(self, steps: Sequence[StepNumbers]) -> list[float | None]:
        """Collective: the training loss of each step over all ranks, where a plateau asks for it."""
        if self.plateau is None or not self.plateau.of_training:
            return [None] * len(steps)
        own = torch.stack([torch.stack([numbers.sums.sum(0), numbers.counts.sum(0)]) for numbers in steps])
        totals = self.runtime.sum(own, "all-reduce of the losses that the learning rate follows")
        return [self.parts.objective.summary(sums, counts)["loss/total"] for sums, counts in totals]

    def _skip(self, numbers: StepNumbers, norm: float) -> None:
        own = account(numbers, self.store.split("train"))
        ranks = self.runtime.gather(own, "gather of the skipped step's samples")
        skip = Skip.because(numbers.step, norm, ranks, self._loss_scale)
        self.tracker.event("skip", skip.step, self.guard.skip(skip, ranks))
        self.guard.check(skip, self.run_dir)

    def _log(self, lr: float) -> None:
        self.fetch_step_stats()
        meter = self.meter
        if not meter.steps:  # every step since the last record was skipped: there is no loss to show
            return
        assert isinstance(meter.sums, Tensor) and isinstance(meter.counts, Tensor)
        totals = self.runtime.sum(torch.stack([meter.sums, meter.counts]), "all-reduce of the losses to log")
        seconds = time.perf_counter() - meter.began
        values = {
            **self.parts.objective.summary(*totals),
            "optim/lr": lr,
            "optim/grad_norm": self._norm,
            **({"optim/loss_scale": self._loss_scale} if self.runtime.loss_scale is not None else {}),
            "speed/tokens_per_s": meter.tokens / seconds,
            "speed/samples_per_s": meter.samples / seconds,
            **self._flop_rates(meter.flops / seconds),
            "speed/step_s": seconds / meter.steps,
            "speed/data_wait_s": meter.data_wait_s / meter.steps,
            **load_values(meter.cpu_times),
            "data/epoch": self.state.samples_drawn / len(self.parts.loader.order),
            **self._epochs(),
            "data/tokens": self.state.tokens_seen,
            **(
                {f"data/{name}": size for name, size in asdict(self.batch_size).items()}
                if self.config.train.batch_schedule or self.config.train.auto_micro_batch
                else {}
            ),
            "health/skipped_steps": self.state.skipped_steps,
            **({"data/skipped_samples": len(skipped)} if (skipped := self.parts.skipped_samples) else {}),
            **memory_values(),
        }
        self.tracker.train(self.state.step, values)
        meter.clear()

    def _flop_rates(self, flops_per_s: float) -> dict[str, float]:
        """Of useful FLOPs over all ranks; their share of what the devices give at most, where that is known."""
        rates = {"speed/tflops_per_s": flops_per_s / 1e12}
        if self.peak_flops is not None:
            rates["speed/mfu"] = flops_per_s / (self.peak_flops * self.runtime.world_size)
        return rates

    def _epochs(self) -> dict[str, float]:
        """Of each store, where there are several: an epoch of all does not exist."""
        sources, epochs = self.store.sources, self.parts.loader.order.epochs(self.state.samples_drawn)
        of_each = {f"data/epoch/{source.name}": value for source, value in zip(sources, epochs, strict=True)}
        return of_each if len(of_each) > 1 else {}

    @contextmanager
    def _measuring(self, what: str) -> Iterator[None]:
        """The network as it is measured: without dropout and gradients, by its average where `ema.evaluate` says so.
        The time belongs to no step."""
        self.fetch_step_stats()
        paused = time.perf_counter()
        self.tracker.heartbeat(self.state.step, what)
        runtime = self.runtime
        runtime.unwrapped_model.eval()
        with torch.no_grad(), runtime.averaged() if self.config.ema.measured == "ema" else nullcontext():
            yield
        runtime.unwrapped_model.train()
        self.meter.began += time.perf_counter() - paused

    def _validate(self) -> None:
        parts, config, runtime, step = self.parts, self.config, self.runtime, self.state.step
        with self._measuring("validation"):
            held_out = validation_losses(parts.objective, parts.store, parts.validation_ids, config, runtime)
            run = self._measured()
            pictures = collect_figure_data(run, runtime) if figures_due(step, config) else None
            texts = text_samples(run, runtime, pictures)
            values = {**held_out.values, **(quality_of(pictures) if pictures else {})}
            self.tracker.validation(step, {**values, "weights": config.ema.measured}, held_out.levels)
            for tag, rows in texts.items():
                self.tracker.samples(step, rows, tag)
            if pictures:
                decode = parts.tokenizer.decode_batch
                projected = decode([ids.tolist() for ids in pictures.tokens]) if config.log.projector else None
                self.tracker.pictures(step, pictures, held_out.levels, projected)
        loss, keep_best = values["validation/total"], self.config.checkpoint.keep_best
        if self.plateau is not None:
            self.plateau.measure(self.state.step, loss)
        if math.isfinite(loss):
            self.state.best_validations = sorted([*self.state.best_validations, loss])[: max(1, keep_best)]
            if loss in self.state.best_validations[:keep_best]:
                self.save(validation_loss=loss)

    def _measured(self) -> LoadedRun:
        """The run as it stands, for what is made with its network."""
        config, parts, runtime = self.config, self.parts, self.runtime
        return LoadedRun(
            folder=self.run_dir,
            config=config,
            store=parts.store,
            tokenizer=parts.tokenizer,
            model=runtime.eval_forward,
            objective=parts.objective,
            device=runtime.device,
            step=self.state.step,
            weights=config.ema.measured,
            has_average=config.ema.decay > 0,
        )

    def _measure_quality(self) -> None:
        ids = validation_ids(self.store.split("validation"), self.config.validation.quality_samples)
        with self._measuring("quality"):
            self.tracker.quality(self.state.step, quality(self._measured(), ids, self.runtime))

    def save(self, wait: bool = False, validation_loss: float | None = None) -> None:
        """Begin a checkpoint of this moment, if there is none yet; with `wait`, every checkpoint is there at the end.

        With its `validation_loss`, it may be among the best that are kept.
        """
        self.fetch_step_stats()
        if self.saved_at != self.state.step:
            paused = time.perf_counter()
            # Flushes the curves before the checkpoint exists, so that a kill in between leaves no gap after resuming.
            self.tracker.heartbeat(self.state.step, "saving")
            if self.runtime.loss_scale is not None:
                self.state.loss_scale, self.state.steps_at_scale = self.runtime.loss_scale.read()
            info = {**self.provenance, "validation_loss": validation_loss}
            files = {**self.metadata_files, "state.json": self.state.to_json().encode()}
            self.log_checkpoint(self.saver.start(self.state.step, files, info))
            self.saved_at = self.state.step
            self.save_schedule.saved()
            self.meter.began += time.perf_counter() - paused
        if wait:
            self.log_checkpoint(self.saver.finish())

    def _raise_if_stopped(self) -> None:
        if not self._stop_agreed:
            return
        self.save(wait=True)
        name = self.signals.stop = self.signals.stop or "a signal on another rank"
        self.tracker.end(self.state.step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {self.state.step}; saved, the same command goes on")
