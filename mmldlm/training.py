"""`Training`: everything a run holds between its first and its last step; the loop itself is in `train.py`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.build import build_model, build_objective
from mmldlm.checkpoint import CheckpointStore, RunLock, TrainState
from mmldlm.config import RunConfig, write_config
from mmldlm.data.loader import Loader
from mmldlm.data.shards import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import NoisedBatch, total_counts
from mmldlm.errors import NumericalError, StoppedBySignal, StorageError, outcome
from mmldlm.model.mmdit import count_parameters
from mmldlm.optim import build_optimizer, resolve_fused
from mmldlm.resume import check_resume, restore, save
from mmldlm.runtime.engine import Update, start, versions
from mmldlm.runtime.signals import StopRequest
from mmldlm.schema import dump
from mmldlm.telemetry import Meter, Tracker, memory_values
from mmldlm.validation import text_samples, validation_ids, validation_losses


class Training:
    """Context manager around a run: opens and locks its folder, restores it, and leaves it complete."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._stack = ExitStack()
        self._holds_run = False
        self.state = TrainState()
        self.saved_at: int | None = None

    def __enter__(self) -> Training:
        try:
            self._open()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Leave `exit.json`, since launchers collapse exit codes; only whoever holds the run may."""
        if self._holds_run:
            code, cause = outcome(error)
            rank = self.runtime.rank
            record = {"code": code, "rank": rank, "step": self.state.step, "cause": cause, "time": time.time()}
            name = f"exit.rank{rank}.json" if rank else "exit.json"
            with suppress(OSError):  # the disk may be what ended the run
                (self.run_dir / name).write_text(json.dumps(record) + "\n", encoding="utf-8")
        self._stack.close()

    def _open(self) -> None:
        config = self.config
        # All that can be refused is refused before anything is created.
        check_resume(config.resume)
        self.store = Store.open(config.data.path)
        validation = self.store.split("validation")
        self.runtime = start(config.distributed, config.precision)
        self._stack.callback(self.runtime.close)
        runtime = self.runtime
        self.micro_batch_size = config.train.resolved_micro_batch_size(runtime.world_size)
        self.loader = Loader(
            self.store,
            "train",
            config.data,
            config.run.seed,
            config.train.global_batch_size,
            self.micro_batch_size,
            runtime.rank,
            runtime.world_size,
            runtime.device.type,
        )
        self.objective = build_objective(config, self.store.manifest)
        model = build_model(config, self.store.manifest, runtime.device.type).to(runtime.device)
        self.parameters = count_parameters(model)
        optimizer = build_optimizer(model, config.optim, runtime.device.type)

        self.run_dir = Path(config.run.dir)
        if runtime.is_main:
            self._create_folder()
            self._stack.enter_context(RunLock(self.run_dir))
        runtime.barrier()
        self._holds_run = True
        self.checkpoints = CheckpointStore(self.run_dir / "checkpoints", config.checkpoint.keep_last)
        self.state, notes = restore(self.checkpoints, model, optimizer, config, self.store, runtime.is_main)
        if config.resume == "auto" and self.state.step:
            self.saved_at = self.state.step  # it came from this very folder
        runtime.prepare(model, optimizer)
        runtime.model.train()
        self.weights = mode_weights(config.mode)
        self.validation_ids = validation_ids(validation, config.validation.samples)
        self.tokenizer = Tokenizer.load(self.store.path / "tokenizer")
        self.meter = Meter()
        self.skipped_in_a_row = 0
        self.stop = self._stack.enter_context(StopRequest())
        self._begin(notes)

    def _create_folder(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"run.dir: cannot create {self.run_dir}: {error.strerror}") from None

    def _begin(self, notes: list[str]) -> None:
        config, runtime, stored = self.config, self.runtime, self.store.manifest.splits
        # A run that died before its first checkpoint goes on from step 0: its records are dropped likewise.
        resumed = config.resume != "never" and (self.run_dir / "metrics.jsonl").exists()
        self.tracker = self._stack.enter_context(
            Tracker(self.run_dir, config.train.steps, self.state.step, resumed, runtime.is_main, config.log.tensorboard)
        )
        if not runtime.is_main:
            return
        write_config(config, self.run_dir)
        info = {
            "engine": runtime.engine,
            "world_size": runtime.world_size,
            "device": str(runtime.device),
            "threads": torch.get_num_threads(),
            "precision": config.precision,
            "attention": getattr(runtime.bare_model, "backend", ""),
            "optimizer": f"AdamW{', fused' if resolve_fused(config.optim.fused, runtime.device.type) else ''}",
            "parameters": sum(self.parameters.values()),
            "global_batch_size": config.train.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "accumulation": config.train.global_batch_size // (self.micro_batch_size * runtime.world_size),
            "loader_workers": self.loader.num_workers,
            "timeout_s": config.distributed.timeout_s if runtime.world_size > 1 else None,
            "train_samples": stored["train"].samples,
            "train_tokens": stored["train"].tokens,
            "versions": versions(),
            "pid": os.getpid(),
        }
        self.tracker.start(info, dump(config))
        print("\n".join([*notes, f"run {self.run_dir}: steps {self.state.step} to {config.train.steps}"]))
        print("  " + ", ".join(f"{name} {value}" for name, value in info.items() if not isinstance(value, dict)))

    # --- the loop's verbs ---------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Steps still to do and this rank's micro-batches; ends the run at a signal, saved."""
        batches = iter(self.loader.steps(self.state.step, self.config.train.steps))
        self.meter.clear()
        while True:
            waited = time.perf_counter()
            try:
                step, micro_batches = next(batches)
            except StopIteration:
                break
            self.meter.data_wait_s += time.perf_counter() - waited
            if self.config.model.dropout:  # the one draw that is not a function of (seed, step, slot)
                torch.manual_seed(hash((self.config.run.seed, step, self.runtime.rank)) % 2**63)
            yield step, micro_batches
            self._raise_if_stopped()
        self.save()
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    def corrupt(self, step: int, micro_batches: list[Batch]) -> tuple[list[NoisedBatch], list[float]]:
        """The step's corrupted micro-batches on the device, and their counts summed over all ranks."""
        config = self.config
        noised = [
            self.objective.corrupt(
                batch,
                draw_noise(
                    batch,
                    config.run.seed,
                    step,
                    config.train.global_batch_size,
                    self.weights,
                    config.latent.time_sampling,
                ),
            )
            for batch in micro_batches
        ]
        # The wish to stop rides along: all ranks leave after the same step.
        tokens, stop = sum(batch.layout.num_tokens for batch in noised), self.stop.signal_name is not None
        totals = self.runtime.sum(torch.cat([total_counts(noised), torch.tensor([tokens, stop], dtype=torch.float64)]))
        self._step_tokens, self._stop_agreed = int(totals[-2]), bool(totals[-1])
        return [batch.to(self.runtime.device) for batch in noised], totals[:-2].tolist()

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
        sums, counts = runtime.sum(meter.sums), runtime.sum(meter.counts)
        seconds = time.perf_counter() - meter.began
        values = {
            **self.objective.summary(sums, counts),
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
        model = self.runtime.bare_model
        model.eval()
        with torch.no_grad(), self.runtime.accelerator.autocast():
            values = validation_losses(
                model, self.objective, self.store, self.validation_ids, self.config, self.runtime
            )
            if self.config.validation.text_samples and self.runtime.is_main:
                rows = text_samples(model, self.objective, self.store, self.tokenizer, self.config, self.runtime.device)
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
        paused = time.perf_counter()
        if self.runtime.is_main:
            # Flushes the curves before the checkpoint exists, so that a kill in between leaves no gap after resuming.
            self.tracker.heartbeat(self.state.step, "saving")
            made_by = {"engine": self.runtime.engine, "world_size": self.runtime.world_size, "versions": versions()}
            model, optimizer = self.runtime.bare_model, self.runtime.bare_optimizer
            path = save(self.checkpoints, model, optimizer, self.state, self.config, self.store, made_by)
            self.tracker.event(
                "checkpoint", self.state.step, {"path": str(path), "seconds": time.perf_counter() - paused}
            )
        self.runtime.barrier()
        self.saved_at = self.state.step
        self.meter.began += time.perf_counter() - paused

    def _raise_if_stopped(self) -> None:
        if not self._stop_agreed:
            return
        self.save()
        name = self.stop.signal_name or "a signal on another rank"
        self.tracker.end(self.state.step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {self.state.step}; saved, the same command goes on")
