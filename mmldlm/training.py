"""`Training`: everything a run holds between its first and its last step; the loop itself is in `train.py`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.checkpoint import CheckpointStore, RunLock, TrainState
from mmldlm.config import RunConfig, write_config
from mmldlm.data.loader import check_batch
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch, total_counts
from mmldlm.errors import ExitCode, MmldlmError, NumericalError, PeerLostError, StoppedBySignal, outcome
from mmldlm.files import write_atomically
from mmldlm.resume import check_resume, choose, restore, save
from mmldlm.runtime.engine import Update
from mmldlm.runtime.last_words import clear_exit_files, write_exit
from mmldlm.runtime.launch import Launch, read_launch
from mmldlm.runtime.signals import StopRequest
from mmldlm.runtime.start import start
from mmldlm.schema import dump
from mmldlm.startup import (
    check_shared_folder,
    compare_ranks,
    create_run_folder,
    open_parts,
    report_lines,
    startup_report,
    step_plan,
)
from mmldlm.telemetry import Meter, Tracker, memory_values
from mmldlm.validation import text_samples, validation_losses


class Training:
    """Context manager around a run: opens and locks its folder, restores it, and leaves it complete."""

    def __init__(self, config: RunConfig, launch: Launch | None = None):
        self.config = config
        self.launch = launch or read_launch(os.environ)
        self.run_dir = Path(config.run.dir)
        self._stack = ExitStack()
        self._holds_run = False
        self.state = TrainState()
        self.saved_at: int | None = None
        self._rehearsed = False

    def __enter__(self) -> Training:
        try:
            self._open()
        except BaseException as error:
            lost = self._close(error)
            if lost is not None:
                raise lost from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = self._close(error)
        if lost is not None:
            raise lost from error

    def _close(self, error: BaseException | None) -> PeerLostError | None:
        """Leave `exit.json`, since launchers collapse exit codes; only whoever holds the run may.

        Returns the loss of a peer where that is what stands behind `error`.
        """
        watchdog = self.runtime.watchdog if hasattr(self, "runtime") else None
        lost = None
        if watchdog is not None and isinstance(error, Exception):
            lost = None if isinstance(error, MmldlmError) else watchdog.diagnose(error)
            self.runtime.peer_lost = isinstance(lost or error, PeerLostError)
        code, cause = outcome(lost or error)
        if watchdog is not None and code not in (ExitCode.DONE, ExitCode.STOPPED):
            watchdog.fail(code, cause)
        if self._holds_run:
            with suppress(OSError):  # the disk may be what ended the run
                write_exit(self.run_dir, self.launch.rank, self.state.step, code, cause)
        self._stack.close()
        return lost

    def _open(self) -> None:
        config = self.config
        # All that can be refused is refused before anything is created.
        check_resume(config.resume)
        micro_batch_size = config.train.resolved_micro_batch_size(self.launch.world_size)
        check_batch(config.data, config.train.global_batch_size, micro_batch_size, self.launch.world_size)
        self.plan = step_plan(config, self.launch.world_size)
        self.runtime = runtime = start(config.distributed, self.launch, self.plan)
        self._stack.callback(runtime.close)
        with runtime.agreeing("opening of the data"):
            self.parts = open_parts(config, self.plan, runtime)
        self.store = self.parts.store
        fingerprint = compare_ranks(runtime, config, self.store)
        with runtime.agreeing("opening of the run folder"):
            if runtime.is_main:
                create_run_folder(self.run_dir)
                self._stack.enter_context(RunLock(self.run_dir))
                clear_exit_files(self.run_dir)
        check_shared_folder(runtime, self.run_dir)
        self._holds_run = True
        if runtime.watchdog is not None:
            runtime.watchdog.watch(self.run_dir)
        notes = self._restore()
        self._begin(notes, fingerprint)

    def _restore(self) -> list[str]:
        """Weights before the engine wraps the model, the optimizer's state after; rank 0 chooses for all."""
        config, runtime = self.config, self.runtime
        self.checkpoints = CheckpointStore(self.run_dir / "checkpoints", config.checkpoint.keep_last)
        chosen = None
        with runtime.agreeing("choice of the checkpoint"):
            if runtime.is_main:
                chosen = choose(self.checkpoints, config)
        chosen = runtime.gather(chosen and str(chosen), "choice of the checkpoint")[0]
        with runtime.agreeing("loading of the checkpoint"):
            restored = restore(chosen and Path(chosen), self.parts.model, config, self.store)
        runtime.prepare(self.parts.model, self.parts.optimizer)
        runtime.check_precision()
        if restored.moments is not None:
            runtime.load_optimizer_state(restored.moments)
            if runtime.is_main:
                self.checkpoints.set_aside_after(restored.state.step)
        self.state = restored.state
        if config.resume == "auto" and self.state.step:
            self.saved_at = self.state.step  # it came from this very folder
        return restored.notes

    def _begin(self, notes: list[str], fingerprint: Mapping[str, str]) -> None:
        config, runtime = self.config, self.runtime
        runtime.model.train()
        self.meter = Meter()
        self.skipped_in_a_row = 0
        self.stop = self._stack.enter_context(StopRequest())
        report = startup_report(runtime, config, self.plan, self.parts, fingerprint)
        self.made_by = {key: report[key] for key in ("engine", "world_size", "versions", "git")}
        # A run that died before its first checkpoint goes on from step 0: its records are dropped likewise.
        resumed = config.resume != "never" and (self.run_dir / "metrics.jsonl").exists()
        self.tracker = self._stack.enter_context(
            Tracker(self.run_dir, config.train.steps, self.state.step, resumed, runtime.is_main, config.log.tensorboard)
        )
        if not runtime.is_main:
            return
        write_config(config, self.run_dir)
        write_atomically(self.run_dir / "startup.json", (json.dumps(report, indent=1) + "\n").encode())
        splits = self.store.manifest.splits
        self.tracker.start({**report, "samples": {name: split.samples for name, split in splits.items()}}, dump(config))
        lines = [*notes, f"run {self.run_dir}: steps {self.state.step} to {config.train.steps}"]
        print("\n".join(lines + [f"  {line}" for line in report_lines(report)]), flush=True)

    # --- the loop's verbs ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Steps still to do and this rank's micro-batches; ends the run at a signal, saved."""
        batches = iter(self.parts.loader.steps(self.state.step, self.config.train.steps))
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
            if self.config.model.dropout:  # the one draw that is not a function of (seed, step, slot)
                torch.manual_seed(hash((self.config.run.seed, step, self.runtime.rank)) % 2**63)
            yield step, micro_batches
            self._raise_if_stopped()
        self.save()
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    def corrupt(self, step: int, micro_batches: list[Batch]) -> tuple[list[NoisedBatch], list[float]]:
        """The step's corrupted micro-batches on the device, and their counts summed over all ranks."""
        config = self.config
        weights = mode_weights_at(step, config.mode, config.mode_schedule)
        noised = [
            self.parts.objective.corrupt(
                batch,
                draw_noise(
                    batch,
                    config.run.seed,
                    step,
                    config.train.global_batch_size,
                    weights,
                    config.latent.time_sampling,
                ),
            )
            for batch in micro_batches
        ]
        # The wish to stop rides along: all ranks leave after the same step.
        tokens, stop = sum(batch.layout.num_tokens for batch in noised), self.stop.signal_name is not None
        own = torch.cat([total_counts(noised), torch.tensor([tokens, stop], dtype=torch.float64)])
        totals = self.runtime.sum(own, "all-reduce of the step's counts")
        self._step_tokens, self._stop_agreed = int(totals[-2]), bool(totals[-1])
        on_device, counts = [batch.to(self.runtime.device) for batch in noised], totals[:-2].tolist()
        if not self._rehearsed:
            self._rehearsed = True
            self.runtime.rehearse(lambda network: self.parts.objective(network, on_device[0], counts)[0])
        return on_device, counts

    def finish_step(self, lr: float, update: Update) -> None:
        """Count the step; log, validate and save where they are due."""
        config, state = self.config, self.state
        state.step += 1
        self._guard(update)
        if not update.skipped:
            self.meter.take(self._step_tokens)
            state.samples_seen += config.train.global_batch_size
            state.tokens_seen += self._step_tokens
        last = state.step == config.train.steps
        if state.step % config.log.every == 0 or last:
            self._log(lr, update)
        if config.validation.every and (state.step % config.validation.every == 0 or last):
            self._validate()
        if config.checkpoint.every_steps and state.step % config.checkpoint.every_steps == 0 and not last:
            self.save()

    def _guard(self, update: Update) -> None:
        if not update.skipped:
            self.skipped_in_a_row = 0
            return
        self.meter.forget()
        self.state.skipped_steps += 1
        self.skipped_in_a_row += 1
        self.tracker.event("skip", self.state.step, {"optim/grad_norm": update.grad_norm})
        guard = self.config.guard
        if guard.nonfinite == "stop" or self.skipped_in_a_row >= guard.max_consecutive:
            raise NumericalError(
                f"step {self.state.step}: gradient norm {update.grad_norm}, {self.skipped_in_a_row} steps in a row "
                f"were not finite (guard.nonfinite: {guard.nonfinite}, guard.max_consecutive: {guard.max_consecutive})"
            )

    def _log(self, lr: float, update: Update) -> None:
        meter, runtime = self.meter, self.runtime
        if not meter.steps:  # every step since the last record was skipped: there is no loss to show
            return
        assert isinstance(meter.sums, Tensor) and isinstance(meter.counts, Tensor)
        sums = runtime.sum(meter.sums, "all-reduce of the losses to log")
        counts = runtime.sum(meter.counts, "all-reduce of the counts to log")
        seconds = time.perf_counter() - meter.began
        values = {
            **self.parts.objective.summary(sums, counts),
            "optim/lr": lr,
            "optim/grad_norm": update.grad_norm,
            "speed/tokens_per_s": meter.tokens / seconds,
            "speed/samples_per_s": meter.steps * self.config.train.global_batch_size / seconds,
            "speed/step_s": seconds / meter.steps,
            "speed/data_wait_s": meter.data_wait_s / meter.steps,
            "data/epoch": self.state.step * self.config.train.global_batch_size / len(self.store.split("train")),
            "data/tokens": self.state.tokens_seen,
            "health/skipped_steps": self.state.skipped_steps,
            **memory_values(),
        }
        self.tracker.train(self.state.step, values)
        meter.clear()

    def _validate(self) -> None:
        paused = time.perf_counter()
        self.tracker.heartbeat(self.state.step, "validation")
        parts, runtime = self.parts, self.runtime
        model = runtime.bare_model
        model.eval()
        with torch.no_grad():
            values = validation_losses(parts.objective, parts.store, parts.validation_ids, self.config, runtime)
            # Where a forward pass is collective, all ranks write the same texts.
            if self.config.validation.text_samples and (runtime.is_main or runtime.shards_parameters):
                rows = text_samples(parts.objective, parts.store, parts.tokenizer, self.config, runtime)
                self.tracker.samples(self.state.step, rows, "l2t")
        model.train()
        self.tracker.validation(self.state.step, values)
        best, loss = self.state.best_validation, values["validation/total"]
        if math.isfinite(loss):
            self.state.best_validation = loss if best is None else min(best, loss)
        self.meter.began += time.perf_counter() - paused

    def save(self) -> None:
        """A checkpoint of this moment, if there is none yet; every rank calls it, one writes."""
        if self.saved_at == self.state.step:
            return
        paused, runtime = time.perf_counter(), self.runtime
        # Flushes the curves before the checkpoint exists, so that a kill in between leaves no gap after resuming.
        self.tracker.heartbeat(self.state.step, "saving")
        weights, moments = runtime.gather_state()
        with runtime.agreeing("end of saving"):
            if runtime.is_main:
                path = save(self.checkpoints, weights, moments, self.state, self.config, self.store, self.made_by)
                seconds = time.perf_counter() - paused
                self.tracker.event("checkpoint", self.state.step, {"path": str(path), "seconds": seconds})
        self.saved_at = self.state.step
        self.meter.began += time.perf_counter() - paused

    def _raise_if_stopped(self) -> None:
        if not self._stop_agreed:
            return
        self.save()
        name = self.stop.signal_name or "a signal on another rank"
        self.tracker.end(self.state.step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {self.state.step}; saved, the same command goes on")
