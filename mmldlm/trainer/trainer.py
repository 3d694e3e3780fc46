"""`Trainer`: one training run. The loop itself is in `train.py`."""

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
from mmldlm.evaluation.visualize import collect_figure_data, figure_metrics, figures_due, text_samples
from mmldlm.optim.ema import decay_at
from mmldlm.optim.lr_schedule import batch_scale, lr_at
from mmldlm.run.load import LoadedRun
from mmldlm.telemetry import StepNumbers, cpu_load_metrics, memory_metrics, phase
from mmldlm.trainer.lifecycle import RunContext
from mmldlm.trainer.step_guard import Skip, micro_batch_records, propagate_nonfinite


class Trainer(RunContext):
    """An open training run, with the methods that `train.train_step` calls for each step."""

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield the remaining steps, counted from 0, with this rank's micro-batches; save the run at the end.

        Raises:
            StoppedBySignal: a rank received a signal to stop; a checkpoint has been saved.
        """
        batches = self._remaining_steps()
        self.meter.clear()
        while True:
            started = time.perf_counter()
            try:
                step, micro_batches = next(batches)
            except StopIteration:
                break
            self.meter.data_wait_s += time.perf_counter() - started
            if self.runtime.watchdog is not None:
                self.runtime.watchdog.set_step(step)
            if self.auto_micro_batch is not None:
                change = self.auto_micro_batch.shrink(step, micro_batches)
                if change is not None:
                    self.tracker.event("micro_batch", step + 1, change)
                    batches = self._remaining_steps()  # repeats this step with the same samples
                    continue
            if self.config.model.dropout:  # the only random draw that is not a function of (seed, step, slot)
                torch.manual_seed(hash((self.config.run.seed, step, self.runtime.rank)) % 2**63)
            with self.profiler.trace_step(step + 1):
                yield step, micro_batches
            self._raise_if_stopped()
        self.save(wait=True)
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    def _remaining_steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Return an iterator over the steps after the present state, with this rank's micro-batches."""
        return self.components.loader.steps(self.state.step, self.config.train.steps, self.state.samples_drawn)

    @phase("corrupt")
    def corrupt(self, step: int, micro_batches: list[Batch]) -> tuple[list[NoisedBatch], list[float]]:
        """Noise the micro-batches of a step and exchange what all ranks must know about it (collective).

        Returns:
            The noised micro-batches on the device, and the counts by which losses are divided, summed over all ranks.
        """
        config, self.batch_size = self.config, self.components.loader.batch_at(step)
        weights = mode_weights_at(step, config.mode, config.mode_schedule)
        noised = [
            self.components.objective.corrupt(
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
        # Token counts and requests of single ranks share the all-reduce of the loss counts, so that all ranks act on
        # them after the same step at no further cost.
        layouts = [batch.layout for batch in noised]
        work_counts = [
            sum(layout.num_tokens for layout in layouts),
            sum(layout.num_pairs for layout in layouts),
            sum(len(batch.positions) for batch in noised),
        ]
        flags = [
            self.signals.stop is not None,
            self.save_schedule.save_requested(),
            self.checkpointer.ready,
            self.checkpointer.failed,
        ]
        local = torch.cat([total_counts(noised), torch.tensor([*work_counts, *flags], dtype=torch.float64)])
        totals = self.runtime.sum(local, "all-reduce of the step's counts").tolist()
        counts, (tokens, pairs, masked, stop, save, ready, failed) = totals[:-7], map(int, totals[-7:])
        samples, latent_tokens = self.batch_size.global_batch_size, layouts[0].latent_tokens
        self._step_tokens = tokens
        self._step_flops = self.model_flops.step_flops(tokens, masked, samples, latent_tokens, pairs)
        self._stop_agreed, self._save_agreed = bool(stop), bool(save)
        self.log_checkpoint(self.checkpointer.advance(ready, failed))
        on_device = [batch.to(self.runtime.device) for batch in noised]
        if not self._is_warm:
            self._is_warm = True
            self.runtime.warm_up(lambda network: self.components.objective(network, on_device[0], counts)[0])
        return on_device, counts

    @phase("forward")
    def forward(self, batch: NoisedBatch, totals: list[float]) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's share of the step's loss, and its detached loss sums for the meter."""
        return self.components.objective(self.runtime.forward, batch, totals)

    @phase("backward")
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; a non-finite loss makes all gradients NaN, so that all ranks skip the step."""
        self.runtime.backward(propagate_nonfinite(loss))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of `step`, whose batch must be the last one passed to `corrupt`."""
        config = self.config
        scale = batch_scale(config.optim, self.batch_size.global_batch_size)
        return lr_at(step, config.train.steps, config.optim, config.schedule, scale, self.state.lr_cuts)

    @phase("update")
    def update(self, lr: float) -> Tensor:
        """Clip, step the optimizer and update the EMA; skip all of it if the gradient norm is non-finite or a spike.

        Returns:
            The gradient norm before clipping, a 0-d tensor on the device.
        """
        decay = decay_at(self.state.step, self.config.ema)
        return self.runtime.update(lr, self.config.optim.clip_norm, self.guard.norm_limit, decay)

    def finish_step(self, lr: float, norm: Tensor, micro_batches: Sequence[Batch]) -> None:
        """Count the step; log, validate, evaluate and save if they are due."""
        config, state = self.config, self.state
        state.step += 1
        self.tracker.step_done(state.step)
        samples, sample_ids = self.batch_size.global_batch_size, [batch.sample_ids.tolist() for batch in micro_batches]
        state.samples_drawn += samples
        scale = self._unscaled if self.runtime.loss_scale is None else self.runtime.loss_scale.last_scale
        self.meter.end_step(state.step, norm, scale, self._step_tokens, self._step_flops, samples, sample_ids)
        # The limit of the next step's gradient norm depends on the norm of this step.
        fetch_now = not self.defer_fetch or config.guard.grad_norm_spike is not None
        fetch_now = fetch_now or (self.plateau is not None and self.plateau.due(state.step))
        if fetch_now or len(self.meter.pending) >= config.guard.max_consecutive:
            self.fetch_step_stats()
        if config.train.is_due(state.step, config.log.every):
            self._log(lr)
        if config.train.is_due(state.step, config.validation.every):
            self._validate()
        if config.train.is_due(state.step, config.validation.quality_every):
            self._evaluate_quality()
        if (self.save_schedule.due(state.step) or self._save_agreed) and state.step < config.train.steps:
            self.save()

    def fetch_step_stats(self) -> None:
        """Fetch the numbers of all steps since the last call, and count each as accepted or skipped (collective).

        This is the only host-device synchronization of the loop, so it is deferred: call it before reading counters,
        curves or the guard's state.

        Raises:
            NumericalError: a skipped step ends the run by the settings of `guard`.
        """
        if not self.meter.pending:
            return
        with self.runtime.in_collective("numbers of the last steps"):
            steps = self.meter.fetch()
        for numbers, loss in zip(steps, self._plateau_losses(steps), strict=True):
            norm, self._loss_scale = float(numbers.norm), float(numbers.loss_scale)
            accepted = is_accepted(numbers.norm, self.guard.norm_limit)
            if self.plateau is not None and self.plateau.uses_training_loss:
                self.plateau.observe_training_loss(numbers.step, loss if accepted else None)
            if not accepted:
                self._skip(numbers, norm)
                continue
            assert numbers.losses.isfinite().all(), f"step {numbers.step}: {numbers.losses}, but a norm of {norm}"
            self.guard.record_accepted(norm)
            self.meter.accumulate(numbers)
            self.state.samples_seen += numbers.samples
            self.state.tokens_seen += numbers.tokens
        self._norm = norm

    def _plateau_losses(self, steps: Sequence[StepNumbers]) -> list[float | None]:
        """Return each step's training loss over all ranks if the plateau schedule needs it (collective)."""
        if self.plateau is None or not self.plateau.uses_training_loss:
            return [None] * len(steps)
        local = torch.stack([torch.stack([numbers.sums.sum(0), numbers.counts.sum(0)]) for numbers in steps])
        totals = self.runtime.sum(local, "all-reduce of the losses that the learning rate follows")
        return [self.components.objective.summary(sums, counts)["loss/total"] for sums, counts in totals]

    def _skip(self, numbers: StepNumbers, norm: float) -> None:
        """Record a skipped step with the samples of all ranks; end the run if the guard says so (collective)."""
        records = micro_batch_records(numbers, self.store.split("train"))
        ranks = self.runtime.gather(records, "gather of the skipped step's samples")
        skip = Skip.classify(numbers.step, norm, ranks, self._loss_scale)
        self.tracker.event("skip", skip.step, self.guard.skip(skip, ranks))
        self.guard.check(skip, self.run_dir)

    def _log(self, lr: float) -> None:
        """Write a record of the steps since the last one (collective)."""
        self.fetch_step_stats()
        meter = self.meter
        if not meter.steps:  # every step since the last record was skipped: there is no loss to log
            return
        assert isinstance(meter.sums, Tensor) and isinstance(meter.counts, Tensor)
        totals = self.runtime.sum(torch.stack([meter.sums, meter.counts]), "all-reduce of the losses to log")
        seconds = time.perf_counter() - meter.start_time
        values = {
            **self.components.objective.summary(*totals),
            "optim/lr": lr,
            "optim/grad_norm": self._norm,
            **({"optim/loss_scale": self._loss_scale} if self.runtime.loss_scale is not None else {}),
            "speed/tokens_per_s": meter.tokens / seconds,
            "speed/samples_per_s": meter.samples / seconds,
            **self._flop_rates(meter.flops / seconds),
            "speed/step_s": seconds / meter.steps,
            "speed/data_wait_s": meter.data_wait_s / meter.steps,
            **cpu_load_metrics(meter.cpu_times),
            "data/epoch": self.state.samples_drawn / len(self.components.loader.order),
            **self._epochs(),
            "data/tokens": self.state.tokens_seen,
            **(
                {f"data/{name}": size for name, size in asdict(self.batch_size).items()}
                if self.config.train.batch_schedule or self.config.train.auto_micro_batch
                else {}
            ),
            "health/skipped_steps": self.state.skipped_steps,
            **({"data/skipped_samples": len(skipped)} if (skipped := self.components.skipped_samples) else {}),
            **memory_metrics(),
        }
        self.tracker.train(self.state.step, values)
        meter.clear()

    def _flop_rates(self, flops_per_s: float) -> dict[str, float]:
        """Return the rate of useful FLOPs over all ranks, and the MFU if the peak of the device is known."""
        rates = {"speed/tflops_per_s": flops_per_s / 1e12}
        if self.peak_flops is not None:
            rates["speed/mfu"] = flops_per_s / (self.peak_flops * self.runtime.world_size)
        return rates

    def _epochs(self) -> dict[str, float]:
        """Return the epoch of each store of a mixture; a mixture has no common epoch."""
        sources, epochs = self.store.sources, self.components.loader.order.epochs(self.state.samples_drawn)
        values = {f"data/epoch/{source.name}": value for source, value in zip(sources, epochs, strict=True)}
        return values if len(values) > 1 else {}

    @contextmanager
    def _eval_mode(self, activity: str) -> Iterator[None]:
        """Evaluate the network in this context: no dropout, no gradients, EMA weights if `ema.evaluate` is set.

        The time spent here is not counted as time of a step; heartbeats report `activity`.
        """
        self.fetch_step_stats()
        paused = time.perf_counter()
        self.tracker.heartbeat(self.state.step, activity)
        runtime = self.runtime
        runtime.unwrapped_model.eval()
        with torch.no_grad(), runtime.ema_scope() if self.config.ema.eval_weights == "ema" else nullcontext():
            yield
        runtime.unwrapped_model.train()
        self.meter.start_time += time.perf_counter() - paused

    def _validate(self) -> None:
        """Log validation losses, figures and text samples; save a checkpoint if the loss is among the best."""
        components, config, runtime, step = self.components, self.config, self.runtime, self.state.step
        with self._eval_mode("validation"):
            losses = validation_losses(
                components.objective, components.store, components.validation_ids, config, runtime
            )
            run = self._as_loaded_run()
            figure_data = collect_figure_data(run, runtime) if figures_due(step, config) else None
            texts = text_samples(run, runtime, figure_data)
            values = {**losses.values, **(figure_metrics(figure_data) if figure_data else {})}
            self.tracker.validation(step, {**values, "weights": config.ema.eval_weights}, losses.bin_losses)
            for tag, rows in texts.items():
                self.tracker.samples(step, rows, tag)
            if figure_data:
                decode = components.tokenizer.decode_batch
                projector_texts = decode([ids.tolist() for ids in figure_data.tokens]) if config.log.projector else None
                self.tracker.log_figures(step, figure_data, losses.bin_losses, projector_texts)
        loss, keep_best = values["validation/total"], self.config.checkpoint.keep_best
        if self.plateau is not None:
            self.plateau.observe(self.state.step, loss)
        if math.isfinite(loss):
            self.state.best_validations = sorted([*self.state.best_validations, loss])[: max(1, keep_best)]
            if loss in self.state.best_validations[:keep_best]:
                self.save(validation_loss=loss)

    def _as_loaded_run(self) -> LoadedRun:
        """Return this run in its present state in the form that evaluation and generation take."""
        config, components, runtime = self.config, self.components, self.runtime
        return LoadedRun(
            folder=self.run_dir,
            config=config,
            store=components.store,
            tokenizer=components.tokenizer,
            model=runtime.eval_forward,
            objective=components.objective,
            device=runtime.device,
            step=self.state.step,
            weights=config.ema.eval_weights,
            has_ema=config.ema.decay > 0,
        )

    def _evaluate_quality(self) -> None:
        """Log metrics of texts and latents generated with the present weights."""
        ids = validation_ids(self.store.split("validation"), self.config.validation.quality_samples)
        with self._eval_mode("quality"):
            self.tracker.quality(self.state.step, quality(self._as_loaded_run(), ids, self.runtime))

    def save(self, wait: bool = False, validation_loss: float | None = None) -> None:
        """Start a checkpoint of the present state unless this step has one (collective).

        Args:
            wait: Return only after every checkpoint has been written.
            validation_loss: Loss by which the checkpoint may be kept as one of the best.
        """
        self.fetch_step_stats()
        if self.saved_at != self.state.step:
            paused = time.perf_counter()
            # Flushes the curves before the checkpoint exists, so that a kill in between leaves no gap after resuming.
            self.tracker.heartbeat(self.state.step, "saving")
            if self.runtime.loss_scale is not None:
                self.state.loss_scale, self.state.steps_at_scale = self.runtime.loss_scale.get_state()
            info = {**self.provenance, "validation_loss": validation_loss}
            files = {**self.metadata_files, "state.json": self.state.to_json().encode()}
            self.log_checkpoint(self.checkpointer.start(self.state.step, files, info))
            self.saved_at = self.state.step
            self.save_schedule.saved()
            self.meter.start_time += time.perf_counter() - paused
        if wait:
            self.log_checkpoint(self.checkpointer.finish())

    def _raise_if_stopped(self) -> None:
        """Save and raise `StoppedBySignal` if any rank received a signal to stop."""
        if not self._stop_agreed:
            return
        self.save(wait=True)
        name = self.signals.stop = self.signals.stop or "a signal on another rank"
        self.tracker.end(self.state.step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {self.state.step}; saved, run the same command to resume")
