"""`Trainer`: one training run, opened, trained step by step and closed. The loop itself is in `train.py`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig, resolve_precision, with_absolute_paths
from mmldlm.data.loader import fixed_batches
from mmldlm.diffusion.objective import Network, NoisedBatch, total_counts
from mmldlm.distributed.exit_files import clear_exit_files, write_exit
from mmldlm.distributed.flight_recorder import set_trace_folder
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launcher import LauncherEnv, read_launcher_env
from mmldlm.distributed.memory_probe import is_out_of_memory
from mmldlm.errors import ConfigError, ExitCode, MmldlmError, StoppedBySignal, StorageError, exit_code_and_cause
from mmldlm.evaluation.quality import quality
from mmldlm.evaluation.validate import validation_ids, validation_losses
from mmldlm.evaluation.visualize import collect_figure_data, figure_metrics, figures_due, text_samples
from mmldlm.model.flops import ModelFlops
from mmldlm.optim.ema import decay_at
from mmldlm.optim.lr_schedule import batch_scale, lr_at
from mmldlm.run.factory import corrupt_step, set_matmul_precision
from mmldlm.run.load import LoadedRun
from mmldlm.settings.declaration import dump
from mmldlm.telemetry.notices import Notices
from mmldlm.telemetry.profiler import StepProfiler, phase
from mmldlm.telemetry.tracker import Tracker
from mmldlm.telemetry.tracker_bridges import start_bridges
from mmldlm.trainer.branches import with_rewinds
from mmldlm.trainer.checkpointer import Checkpointer, checkpoint_record
from mmldlm.trainer.consistency import check_run_folder, compare_ranks, create_run_folder
from mmldlm.trainer.memory_fit import all_masked, fit_micro_batches
from mmldlm.trainer.replica_check import ReplicaCheck
from mmldlm.trainer.setup import build_components, build_loader, check_settings, step_plan, with_latent_stats
from mmldlm.trainer.signals import SignalRequests
from mmldlm.trainer.startup_report import report_lines, startup_report, write_run_files
from mmldlm.trainer.step import StepResult, StepTotals
from mmldlm.trainer.step_guard import open_skips_file, propagate_nonfinite
from mmldlm.trainer.step_log import StepLog
from mmldlm.utils.cpu import choose_threads
from mmldlm.utils.files import is_at
from mmldlm.utils.garbage import ScheduledCollection
from mmldlm.utils.lock import RunLock
from mmldlm.utils.malloc import keep_freed_memory
from mmldlm.utils.progress import Progress
from mmldlm.utils.short_repr import truncate

if TYPE_CHECKING:
    from typing_extensions import Self


class Trainer:
    """Context manager of a training run, with the methods that the loop in `train.py` calls for each step.

    Entering it opens and locks the run folder, restores the run's state and writes the start-up report; leaving it
    records how the run ended. `launch` is read from the environment variables by default.
    """

    def __init__(self, config: RunConfig, launch: LauncherEnv | None = None):
        self.launch = launch or read_launcher_env(os.environ)
        self.config = resolve_precision(with_rewinds(config), self.launch.mixed_precision)
        self.run_dir = Path(config.run.dir)
        self.state = TrainState()
        # Closed in reverse: records, the checkpoint's writer, signals, the lock, the engine.
        self._stack = ExitStack()
        self._signals = SignalRequests()
        self._owned_dir: int | None = None  # descriptor of the run folder, once `exit.json` is ours to write

    # --- opening and closing -------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            fingerprint = self._open()
            notes, checkpoint = self._restore()
            self._start(notes, fingerprint, checkpoint)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything, and write `exit.json` if this run owns the folder, since launchers collapse exit codes.

        Raises:
            MmldlmError: The cause of `error`: the loss of a peer, memory that ran out, or a run folder that is gone.
        """
        # Entering may have failed at any point, so `engine` and `tracker` may be missing.
        engine = getattr(self, "engine", None)
        lost: MmldlmError | None = None
        if engine is not None and isinstance(error, Exception):
            lost = self._out_of_memory(error) if is_out_of_memory(error) else None
            lost = engine.diagnose(lost or error) or lost
        owns_dir = self._owned_dir is not None and is_at(self._owned_dir, self.run_dir)
        if isinstance(error, FileNotFoundError) and self._owned_dir is not None and not owns_dir:
            lost = StorageError(f"{self.run_dir} was moved or deleted while the run wrote to it")
        code, cause = exit_code_and_cause(lost or error)
        single = self.launch.world_size == 1 and code != ExitCode.INTERRUPTED
        if hasattr(self, "log") and single:
            with suppress(Exception):  # a device that has failed has no numbers
                self.log.fetch()
        if hasattr(self, "tracker") and (code == ExitCode.NUMERICAL or single):
            # All ranks are here, so the checkpoint in progress, which is older than the error, can be completed.
            with suppress(MmldlmError):
                self.checkpointer.record(self.checkpointer.finish(), self.tracker)
        if engine is not None and engine.watchdog is not None and not owns_dir:
            engine.watchdog.folder = None
        if engine is not None and engine.watchdog is not None and code not in (ExitCode.DONE, ExitCode.STOPPED):
            engine.watchdog.fail(code, cause)
        if owns_dir:
            write_exit(self.run_dir, self.launch.rank, self.state.step, code, cause)
        # Last, since it releases the lock: another run may own the folder from then on.
        self._stack.close()
        if lost is not None:
            raise lost from error

    def _open(self) -> dict[str, str]:
        """Check the settings, start the engine, build the components, lock the folder; return the fingerprint."""
        config = self.config
        self._notices = self._stack.enter_context(Notices(log_library_warnings=self.launch.local_rank == 0))
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        check_settings(config, self.launch, device_type)
        if config.memory.keep_freed and device_type == "cpu":
            keep_freed_memory()
        set_trace_folder(self.run_dir)
        set_matmul_precision(config)
        self.engine = engine = start_engine(config.distributed, self.launch, step_plan(config, self.launch.world_size))
        self._stack.callback(engine.close)
        with engine.raise_on_all_ranks("opening of the data"):
            self.components = build_components(config, engine)
        fingerprint = compare_ranks(engine, config, self.components.store)
        with engine.raise_on_all_ranks("opening of the run folder"):
            if engine.is_main:
                create_run_folder(self.run_dir)
                self._stack.enter_context(RunLock(self.run_dir))
                clear_exit_files(self.run_dir)
        check_run_folder(engine, self.run_dir)
        # From here on `exit.json` is ours to write: rank 0 holds the lock, and all ranks see its folder.
        self._owned_dir = os.open(self.run_dir, os.O_RDONLY)
        self._stack.callback(os.close, self._owned_dir)
        if engine.watchdog is not None:
            engine.watchdog.folder = self.run_dir
        return fingerprint

    def _restore(self) -> tuple[list[str], Path | None]:
        """Wrap the model for the engine and restore the run; return notes for the user, and the checkpoint."""
        config, engine = self.config, self.engine
        self.checkpointer = Checkpointer(config, engine, self.run_dir, self._signals)
        with Progress(engine.is_main) as progress:
            progress.phase("verifying and reading the checkpoint", announce=False)
            model, initial = self.components.model, self.components.initial_weights
            restored = self.checkpointer.restore(model, self.components.store, initial)
        # Before the loader reads latents.
        self.components = with_latent_stats(restored.latents, self.components, config, engine)
        self._model_flops = ModelFlops.from_model(self.components.model)
        self._replica_check = ReplicaCheck(engine, config.guard.verify_updates_every)
        engine.prepare(model, self.components.optimizer, restored.weights)
        engine.check_precision()
        self.checkpointer.restore_optimizer(restored)
        if config.ema.decay:
            engine.enable_ema(restored.ema)
        self.state = restored.state
        self._threads_reason = choose_threads(self.state.threads) if engine.world_size == 1 else "the launcher's choice"
        self.state.threads = torch.get_num_threads()
        if engine.loss_scale is not None and self.state.loss_scale is not None:
            engine.loss_scale.restore(self.state.loss_scale, self.state.steps_at_scale)
        else:
            # Without fp16 the scale of an earlier start must not enter the next checkpoint.
            self.state.loss_scale, self.state.steps_at_scale = None, 0
        return restored.notes, restored.path

    def _start(self, notes: list[str], fingerprint: Mapping[str, str], checkpoint: Path | None) -> None:
        """Open everything that a step needs, and write and print the start-up report."""
        engine, store = self.engine, self.components.store
        engine.model.train()
        changes: list[dict[str, Any]] = []
        if self.config.train.auto_micro_batch and self.state.step < self.config.train.steps:
            with Progress(engine.is_main) as progress:
                progress.phase("fitting the micro-batches into memory", announce=False)
                self.config, changes, lines = fit_micro_batches(self.config, self.components, engine, self.state)
            loader = build_loader(self.config, engine, store, self.components.objective)
            self.components, notes = replace(self.components, loader=loader), [*notes, *lines]
        config = self.config
        self._stack.enter_context(self._signals)
        self._stack.callback(self.checkpointer.close)
        report = startup_report(engine, config, self.components, fingerprint, self._threads_reason) | {
            "init": self.checkpointer.origin
        }
        self.checkpointer.describe(report, store)
        # A run that died before its first checkpoint resumes from step 0; its old records are dropped as well.
        resumed = config.resume != "never" and (self.run_dir / "metrics.jsonl").exists()
        self.tracker = self._stack.enter_context(
            Tracker(self.run_dir, config.train.steps, self.state.step, resumed, engine.is_main, config.log.tensorboard)
        )
        skips = open_skips_file(self.run_dir, self.state.step, resumed) if engine.is_main else nullcontext()
        skips_file = self._stack.enter_context(skips)
        hosts = [rank["host"] for rank in report["ranks"]]
        self.log = StepLog(config, engine, self.components, self.state, self.tracker, self.run_dir, skips_file, hosts)
        self.guard = self.log.guard
        for change in changes:
            self.tracker.event("micro_batch", self.state.step + 1, change)
        self._profiler = StepProfiler(config.profile, self.run_dir, engine.rank, engine.device.type)
        self._stack.callback(self._profiler.close)
        self._garbage = self._stack.enter_context(ScheduledCollection())
        if engine.is_main:
            self._notices.write = self.tracker.message
            write_run_files(self.run_dir, config, store, report)
            samples = {name: split.samples for name, split in store.manifest.splits.items()}
            start = {"samples": samples, "resumed_from": checkpoint and checkpoint_record(checkpoint)}
            self.tracker.start({**report, **start}, dump(with_absolute_paths(config)))
            notes = [*notes, *start_bridges(self.run_dir, config.log.trackers)]
            lines = [*notes, f"run {self.run_dir}: steps {self.state.step} to {config.train.steps}"]
            print("\n".join(lines + [f"  {line}" for line in report_lines(report)]), flush=True)
        self._warm_up()

    def _warm_up(self) -> None:
        """Run forward and backward of a sample if the engine needs it, see `Engine.warm_up` (collective)."""
        objective, store = self.components.objective, self.components.store

        def loss_of(network: Network) -> Tensor:
            sample = next(fixed_batches(store.split("train"), [0], micro_batch_size=1))
            batch = all_masked(objective, sample).to(self.engine.device)
            return objective(network, batch, batch.counts.tolist())[0]

        self.engine.warm_up(loss_of)

    def _out_of_memory(self, error: Exception) -> ConfigError:
        train, step = self.config.train, self.state.step
        size = train.batch_at(step, self.launch.world_size)
        key = "micro_batch_tokens" if size.micro_batch_tokens else "micro_batch_size"
        auto = "" if train.auto_micro_batch else " or set train.auto_micro_batch=true"
        return ConfigError(
            f"train.{key}: rank {self.launch.rank} ran out of memory after step {step:,}; expected less than "
            f"{getattr(size, key):,}, which changes no curve: lower it{auto}, or memory.activation_checkpointing=full "
            f"({truncate(' '.join(str(error).split()))})"
        )

    # --- one optimizer step --------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield the remaining steps, counted from 0, with this rank's micro-batches; save the run at the end."""
        batches = self.components.loader.steps(self.state.step, self.config.train.steps, self.state.samples_drawn)
        self.log.stats.start_interval()
        while True:
            started = time.perf_counter()
            self.engine.compute_timer.start()
            item = next(batches, None)
            if item is None:
                break
            step, micro_batches = item
            self.log.stats.data_wait_s += time.perf_counter() - started
            if self.engine.watchdog is not None:
                self.engine.watchdog.step = step
            if self.config.model.dropout:
                # The only random draw that is not a function of (seed, step, slot). Hashes of integers are the same in
                # every process, unlike those of strings: a resumed run repeats them.
                torch.manual_seed(hash((self.config.run.seed, step, self.engine.rank)) % 2**63)
            with self._profiler.trace_step(step + 1):
                yield step, micro_batches
        self.save(wait=True)
        self.tracker.end(self.state.step, {"tokens_seen": self.state.tokens_seen})

    @phase("corrupt")
    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        """Noise the micro-batches of a step, see `corrupt_step`."""
        samples = self.components.loader.batch_at(step).global_batch_size
        return corrupt_step(self.config, self.components.objective, step, samples, micro_batches)

    @phase("sync")
    def sync(self, step: int, noised: Sequence[NoisedBatch]) -> StepTotals:
        """Start to sum over the ranks what each must know of the step, in one all-reduce of float64 (collective).

        The all-reduce runs beside the first forward pass, after which the loss needs it. Besides the denominators of
        the losses these are the work done, and requests and progress of single ranks, on which all ranks can thus act
        at the end of the same step.
        """
        layouts = [batch.layout for batch in noised]
        local = {
            "tokens": sum(layout.num_tokens for layout in layouts),
            "pairs": sum(layout.num_pairs for layout in layouts),
            "masked": sum(len(batch.positions) for batch in noised),
            "stop": self._signals.stop is not None,
            "save": self.checkpointer.save_requested(),
            "ready": self.checkpointer.ready,
            "failed": self.checkpointer.failed,
        }
        work = torch.zeros(2, self.engine.world_size, dtype=torch.float64)
        work[:, self.engine.rank] = torch.tensor(self.engine.compute_timer.take())
        values = torch.cat([total_counts(noised), torch.tensor([*local.values()], dtype=torch.float64), work.flatten()])
        pending = self.engine.start_sum(values, "all-reduce of the step's counts")
        samples = self.components.loader.batch_at(step).global_batch_size
        flops = self._flops(local, sum(layout.num_samples for layout in layouts))
        return StepTotals(pending, tuple(local), self.engine.world_size, samples, flops)

    def _flops(self, counts: Mapping[str, int] | StepTotals, samples: int) -> float:
        """Return the FLOPs of a step with these counts."""
        latent_tokens = self.components.store.manifest.latent.tokens
        return self._model_flops.step_flops(counts["tokens"], counts["masked"], samples, latent_tokens, counts["pairs"])

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        """Yield the micro-batches on the device; gradients are reduced in the backward pass of the last one only."""
        return self.engine.accumulate([batch.to(self.engine.device) for batch in noised])

    @phase("forward")
    def loss(self, batch: NoisedBatch, totals: StepTotals) -> Tensor:
        """Return this micro-batch's share of the step's loss: 0-d, on the device."""
        loss, sums = self.components.objective(self.engine.forward, batch, totals.counts)
        self.log.add(loss, sums, batch)
        return loss

    @phase("backward")
    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; a non-finite loss makes all gradients NaN, so that all ranks skip the step."""
        self.engine.backward(propagate_nonfinite(loss))

    @phase("update")
    def update(self, step: int) -> StepResult:
        """Clip, step the optimizer and update the EMA; skip all of it if the gradient norm is non-finite or a spike."""
        config, state = self.config, self.state
        scale = batch_scale(config.optim, self.components.loader.batch_at(step).global_batch_size)
        lr = lr_at(step, config.train.steps, config.optim, config.schedule, scale, state.lr_cuts)
        norm = self.engine.update(lr, config.optim.clip_norm, self.guard.norm_limit, decay_at(step, config.ema))
        return StepResult(lr, norm)

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        """Count the step; log, validate, evaluate and save if they are due.

        Raises:
            MmldlmError: The checkpoint in progress could not be written.
            NumericalError: A skipped step ends the run by the settings of `guard`, or the ranks' weights differ.
            StoppedBySignal: A rank received a signal to stop; a checkpoint has been saved.
        """
        self.engine.compute_timer.stop(totals.flops)
        config, state, size = self.config, self.state, self.components.loader.batch_at(step)
        self.checkpointer.record(self.checkpointer.advance(totals["ready"], totals["failed"]), self.tracker)
        state.step = step + 1
        self.tracker.step_done(state.step)
        state.samples_drawn += totals.samples
        flops = self._flops(totals, totals.samples)
        self.log.compare_ranks(state.step, totals.work())
        self.log.end_step(state.step, result.grad_norm, totals["tokens"], flops, totals.samples)
        self._replica_check.after_step(state.step, result.lr)
        if config.train.is_due(state.step, config.log.every):
            self.log.write(result.lr, asdict(size))
        if config.train.is_due(state.step, config.validation.every):
            self._validate()
        if config.train.is_due(state.step, config.validation.quality_every):
            self._evaluate_quality()
        # The last step's checkpoint is saved by `steps`, which also waits for it.
        if (self.checkpointer.due(state.step) or totals["save"]) and state.step < config.train.steps:
            self.save()
        self._garbage.end_step(state.step)
        if totals["stop"]:
            self._stop()

    def _stop(self) -> None:
        """Save and raise `StoppedBySignal`."""
        self.save(wait=True)
        # Set on every rank: one that is stopping ignores further SIGTERMs (`SignalRequests.__exit__`).
        name = self._signals.stop = self._signals.stop or "a signal on another rank"
        self.tracker.end(self.state.step, {"stopped_by": name})
        raise StoppedBySignal(f"stopped by {name} after step {self.state.step}; saved, run the same command to resume")

    # --- validation and checkpoints ------------------------------------------------------------------------

    @contextmanager
    def _eval_mode(self, activity: str) -> Iterator[LoadedRun]:
        """Evaluate the network in this context: no dropout, no gradients, EMA weights if `ema.evaluate` is set.

        The time spent here is not counted as time of a step; heartbeats report `activity`.
        """
        self.log.fetch()
        config, components, engine = self.config, self.components, self.engine
        with self.log.stats.paused():
            self.tracker.heartbeat(self.state.step, activity)
            engine.unwrapped_model.eval()
            with torch.no_grad(), engine.ema_scope() if config.ema.eval_weights == "ema" else nullcontext():
                yield LoadedRun(
                    folder=self.run_dir,
                    config=config,
                    store=components.store,
                    tokenizer=components.tokenizer,
                    model=engine.eval_forward,
                    objective=components.objective,
                    device=engine.device,
                    step=self.state.step,
                    weights=config.ema.eval_weights,
                    has_ema=config.ema.decay > 0,
                )
            # Not in a `finally`: an error in the body ends the run, see `Engine.ema_scope`.
            engine.unwrapped_model.train()

    def _validate(self) -> None:
        """Log validation losses, figures and text samples; save a checkpoint if the loss is among the best."""
        components, config, engine, step = self.components, self.config, self.engine, self.state.step
        with self._eval_mode("validation") as run:
            losses = validation_losses(
                components.objective, components.store, components.validation_ids, config, engine
            )
            figure_data = collect_figure_data(run, engine) if figures_due(step, config) else None
            texts = text_samples(run, engine, figure_data)
            values = {**losses.values, **(figure_metrics(figure_data) if figure_data else {})}
            self.tracker.validation(step, {**values, "weights": config.ema.eval_weights}, losses.bin_losses)
            for tag, rows in texts.items():
                self.tracker.samples(step, rows, tag)
            if figure_data:
                decode = components.tokenizer.decode_batch
                projector_texts = decode([ids.tolist() for ids in figure_data.tokens]) if config.log.projector else None
                self.tracker.log_figures(step, figure_data, losses.bin_losses, projector_texts)
        loss, keep_best = values["validation/total"], config.checkpoint.keep_best
        if self.log.plateau is not None:
            self.log.plateau.observe(step, loss)
        if math.isfinite(loss):
            self.state.best_validations = sorted([*self.state.best_validations, loss])[: max(1, keep_best)]
            if loss in self.state.best_validations[:keep_best]:
                self.save(validation_loss=loss)

    def _evaluate_quality(self) -> None:
        """Log metrics of texts and latents generated with the present weights."""
        ids = validation_ids(self.components.store.split("validation"), self.config.validation.quality_samples)
        with self._eval_mode("quality") as run:
            self.tracker.quality(self.state.step, quality(run, ids, self.engine))

    def save(self, wait: bool = False, validation_loss: float | None = None) -> None:
        """Start a checkpoint of the present state unless this step has one (collective); `wait` for its end."""
        self.log.fetch()
        if self.checkpointer.saved_at != self.state.step:
            with self.log.stats.paused():
                # Flushes the curves before the checkpoint exists: a kill in between leaves no gap after resuming.
                self.tracker.heartbeat(self.state.step, "saving")
                if self.engine.loss_scale is not None:
                    self.state.loss_scale, self.state.steps_at_scale = self.engine.loss_scale.get_state()
                self.checkpointer.record(self.checkpointer.save(self.state, validation_loss), self.tracker)
        if wait:
            self.checkpointer.record(self.checkpointer.finish(), self.tracker)
            self.checkpointer.finish_mirror(self.tracker)
