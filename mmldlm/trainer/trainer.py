"""`Trainer`: opens a training run, runs its steps and closes it. The loop itself is in `train.py`.

Everything that a run does beside its steps is in callbacks, see `mmldlm.trainer.callbacks`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig, resolve_precision
from mmldlm.diffusion.objective import NoisedBatch, total_counts
from mmldlm.distributed.launch import LauncherEnv, read_launcher_env
from mmldlm.distributed.notify import Notifier
from mmldlm.errors import StoppedBySignal
from mmldlm.optim.ema import decay_at
from mmldlm.optim.lr_schedule import batch_scale, lr_at
from mmldlm.telemetry.notices import Notices, overfitting_notice
from mmldlm.telemetry.profiler import phase
from mmldlm.trainer.branches import with_rewinds
from mmldlm.trainer.callbacks import build_callbacks
from mmldlm.trainer.checkpointer import Checkpointer
from mmldlm.trainer.graphs import GraphReplays
from mmldlm.trainer.memory_fit import fit_run, warm_up
from mmldlm.trainer.restore import RestoredRun, restore_run
from mmldlm.trainer.run_end import RunEnd
from mmldlm.trainer.setup import open_run
from mmldlm.trainer.signals import SignalRequests
from mmldlm.trainer.startup_report import open_records
from mmldlm.trainer.step_log import StepLog
from mmldlm.trainer.step_numbers import StepCounts, StepNumbers, StepResult, StepTotals
from mmldlm.utils.callback import Callback


class Trainer:
    """Context manager of a training run, with the methods that the loop in `train.py` calls for each step.

    A `step` is counted from 1, as in records and callbacks. `steps_done` is the number of steps before it. Noise,
    learning rate and batch size are functions of `steps_done`.

    On entry it opens and locks the run folder, restores the run's state and writes the start-up report. On exit it
    records how the run ended. By default, `launch` is read from environment variables. After step `stop_at` the run
    saves and stops on all ranks, as after a signal.
    """

    def __init__(self, config: RunConfig, launch: LauncherEnv | None = None, stop_at: int | None = None):
        self.launch = launch or read_launcher_env(os.environ)
        self.config = resolve_precision(with_rewinds(config), self.launch.mixed_precision)
        self.run_dir = Path(config.run.dir)
        self.state = TrainState()
        self.stop_at = stop_at
        self._signals = SignalRequests()
        self._notices = Notices(log_library_warnings=self.launch.local_rank == 0)
        notifier = Notifier("" if self.launch.rank else config.log.notify, self.run_dir)
        self._end = RunEnd(self.run_dir, self.launch, notifier)
        self.callbacks: list[Callback] = []
        self.replays: GraphReplays | None = None

    # --- opening and closing -------------------------------------------------------------------------------

    def __enter__(self) -> Trainer:
        # Imported objects are many and no garbage, so collections during the run need not look at them. But collect
        # once before: an earlier run of this process may have left its network in reference cycles.
        gc.collect()
        if not gc.get_freeze_count():  # otherwise the caller keeps objects out of collections, also after the run
            self._end.callback(gc.unfreeze)
        gc.freeze()
        try:
            self._end.enter_context(self._notices)
            components, fingerprint = open_run(self.config, self.launch, self._end)
            self.engine = components.engine
            restored, self.components = restore_run(components)
            self.state = restored.state
            self._start(restored, fingerprint)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._end.end(error, self.config, self.state.step)
        finally:
            self.callbacks.clear()  # they may hold this trainer, and a cycle would keep network and loader in memory

    def _start(self, restored: RestoredRun, fingerprint: Mapping[str, str]) -> None:
        """Open everything that a step needs. Write and print the start-up report."""
        engine, end = self.engine, self._end
        engine.model.train()
        self.components, changes, notes = fit_run(self.components, self.state)
        components, self.config = self.components, self.components.config
        end.enter_context(self._signals)
        self.tracker, report = open_records(components, restored, fingerprint, notes, end)
        end.notifier.run_id = report["run_id"]
        if engine.is_main:
            self._notices.write = self.tracker.message
        self.checkpointer = Checkpointer(components, restored, report, self._signals)
        end.callback(self.checkpointer.close)
        self.log = StepLog(components, self.state, self.tracker)
        self.numbers = StepNumbers(self.log, end)
        self.guard = self.numbers.guard
        end.own_records(self.numbers.fetch, self._finish_checkpoint)
        for callback in build_callbacks(self.numbers, self.save):
            self.add_callback(callback)
        if components.corruption.sizes is not None:
            self.replays = GraphReplays(self.compute, engine.local_gradients, engine.device)
        for change in changes:
            self.tracker.event("micro_batch", self.state.step + 1, change)
        warm_up(components)

    def add_callback(self, callback: Callback) -> None:
        """Call this callback in each step from now on, after the existing ones. Close it at the end of the run."""
        self.callbacks.append(callback)
        self._end.callback(callback.close)

    # --- one optimizer step --------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Batch | NoisedBatch]]]:
        """Yield (steps done before it, this rank's micro-batches) for each remaining step. Save the run at the end."""
        if self._is_at_stop:
            self._stop(by_signal=False)
        batches = self.components.loader.steps(self.state.step, self.config.train.steps, self.state.samples_drawn)
        self.log.start_interval()
        patience = self.config.train.stop_after_worse
        while not 0 < patience <= self.state.worse_in_a_row:
            started = time.perf_counter()
            item = next(batches, None)
            if item is None:
                break
            steps_done, micro_batches = item
            self.log.data_wait_s += time.perf_counter() - started
            if self.engine.watchdog is not None:
                self.engine.watchdog.step = steps_done
            if self.config.model.dropout:
                # Dropout is the only random draw that is not a function of (seed, step, slot). Unlike hashes of text,
                # hashes of integers are the same in every process, so a resumed run repeats them.
                torch.manual_seed(hash((self.config.run.seed, steps_done, self.engine.rank)) % 2**63)
            for callback in self.callbacks:
                callback.before_step(steps_done + 1)
            yield steps_done, micro_batches
        self.save(wait=True)
        if self.state.step < self.config.train.steps:
            self.tracker.message(
                f"ended after step {self.state.step:,} by train.stop_after_worse: {patience} validations in a row were "
                "worse than the best"
            )
        if found := self.state.overfitting():
            self._end.notifier.overfitting = notice = overfitting_notice(found, self.run_dir)
            self.tracker.message(notice)
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    @phase("corrupt")
    def corrupt(self, steps_done: int, micro_batches: Sequence[Batch | NoisedBatch]) -> list[NoisedBatch]:
        """Noise the micro-batches of a step, see `Corruption`."""
        return self.components.corruption(steps_done, micro_batches)

    @phase("sync")
    def sync(self, steps_done: int, noised: Sequence[NoisedBatch]) -> StepTotals:
        """Start the one all-reduce of a step, in float64, and return its pending sums (collective).

        It sums the loss counts, the tokens and pairs of the step, requests to stop or save, and the progress of
        checkpoints. So all ranks can act on a request at the end of the same step. The all-reduce runs beside the first
        forward pass, and the loss waits for it.
        """
        layouts = [batch.layout.without_filler() for batch in noised]
        counts = StepCounts(
            tokens=sum(layout.num_tokens for layout in layouts),
            pairs=sum(layout.num_pairs for layout in layouts),
            masked=sum(int((batch.token_weight > 0).sum()) for batch in noised),
            stop=self._signals.stop is not None,
            save=self.checkpointer.save_requested(),
            ready=self.checkpointer.ready,
            failed=self.checkpointer.failed,
        )
        denominators = total_counts(noised)
        values = torch.cat([denominators, torch.tensor(counts, dtype=torch.float64)])
        exchanged = self.engine.start_sum(values, "all-reduce of the step's counts")
        samples = self.components.loader.batch_at(steps_done).global_batch_size
        return StepTotals(*exchanged.split(len(denominators)), samples)

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        """Yield the micro-batches on the device. Only the backward pass of the last one reduces gradients.

        With CUDA graphs they are yielded on the host, because each graph has device memory for its inputs.
        """
        on_device = noised if self.replays is not None else [batch.to(self.engine.device) for batch in noised]
        return self.engine.accumulate(on_device)

    def forward_backward(self, batch: NoisedBatch, totals: StepTotals) -> None:
        """Add a micro-batch's gradients to those of the step, by a graph if there is one, and keep its losses."""
        if self.replays is None:
            loss, sums = self.compute(batch, totals.denominators)
        else:
            divisors = self.components.objective.divisors(totals.denominators, batch)
            with phase("replay"), self.engine.compute_timer.measured():
                loss, sums = self.replays(batch, divisors)
        self.numbers.add(loss, sums, batch)

    def compute(self, batch: NoisedBatch, totals: Sequence[float] | Tensor) -> tuple[Tensor, ...]:
        """Run `loss` and `backward`, and return detached results. Graphs record this method, see `GraphReplays`."""
        loss, sums = self.loss(batch, totals)
        self.backward(loss)
        return loss.detach(), sums

    @phase("forward")
    def loss(self, batch: NoisedBatch, totals: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
        """Return this micro-batch's share of the loss of the step (0-d, on the device) and its loss sums."""
        return self.components.objective(self.engine.forward, batch, totals)

    @phase("backward")
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass. A non-finite loss makes all gradients NaN, so that all ranks skip the step."""
        # The factor is NaN if the loss is non-finite, and 1 otherwise.
        self.engine.backward(loss * (1 + 0 * loss.detach()))

    @phase("update")
    def update(self, steps_done: int) -> StepResult:
        """Clip, step the optimizer and update the EMA, unless the gradient norm is non-finite or a spike."""
        config, state = self.config, self.state
        self.engine.complete_gradients()
        for callback in self.callbacks:
            callback.before_update(steps_done + 1)
        scale = batch_scale(config.optim, self.components.loader.batch_at(steps_done).global_batch_size)
        lr = lr_at(steps_done, config.train.steps, config.optim, config.schedule, scale, state.lr_cuts)
        norm = self.engine.update(lr, config.optim.clip_norm, self.guard.norm_limit, decay_at(steps_done, config.ema))
        return StepResult(lr, norm)

    def end_step(self, steps_done: int, totals: StepTotals, result: StepResult) -> None:
        """Count and log the step, call the callbacks, and save if a checkpoint is due or requested.

        Raises:
            MmldlmError: The checkpoint in progress could not be written.
            NumericalError: A skipped step ends the run by the settings of `guard`, or the ranks' weights differ.
            StoppedBySignal: A rank received a stop signal, or `stop_at` is reached. A checkpoint has been saved.
        """
        state, checkpointer = self.state, self.checkpointer
        checkpointer.record(checkpointer.advance(totals.counts.ready, totals.counts.failed), self.tracker)
        step = state.step = steps_done + 1
        state.samples_drawn += totals.samples
        self.tracker.step_done(step)
        self.numbers.end_step(step, totals, result)
        if self.config.train.is_due(step, self.config.log.every):
            self.numbers.fetch()
            self.log.write(step, result.lr)
        for callback in self.callbacks:
            callback.after_step(step)
        # `steps` saves the checkpoint of the last step, and waits for it.
        if (self.config.checkpoint.is_due(step) or totals.counts.save) and step < self.config.train.steps:
            self.save()
        if totals.counts.stop or self._is_at_stop:
            self._stop(by_signal=totals.counts.stop > 0)

    @property
    def _is_at_stop(self) -> bool:
        return self.stop_at is not None and self.stop_at <= self.state.step < self.config.train.steps

    def _stop(self, by_signal: bool) -> NoReturn:
        step = self.state.step
        self.save(wait=True)
        name = self._signals.agree_to_stop() if by_signal else f"--stop-at {self.stop_at}"
        self.tracker.end(step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {step}; saved, run the same command to resume")

    # --- checkpoints ---------------------------------------------------------------------------------------

    def save(self, wait: bool = False, validation_loss: float | None = None) -> None:
        """Start a checkpoint of the present state unless this step has one, and `wait` for it if asked (collective)."""
        self.numbers.fetch()
        if self.checkpointer.saved_at != self.state.step:
            with self.log.paused():
                # Flush the curves before the checkpoint exists. Then a kill leaves no gap in them after resuming.
                self.tracker.heartbeat(self.state.step, "saving")
                if self.engine.loss_scale is not None:
                    self.state.loss_scale, self.state.steps_at_scale = self.engine.loss_scale.get_state()
                self.checkpointer.record(self.checkpointer.save(self.state, validation_loss), self.tracker)
        if wait:
            self._finish_checkpoint()
            self.checkpointer.finish_mirror(self.tracker)

    def _finish_checkpoint(self) -> None:
        self.checkpointer.record(self.checkpointer.finish(), self.tracker)
