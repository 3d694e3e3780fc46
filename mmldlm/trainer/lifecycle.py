"""`RunContext`: opens a run before its first step and closes it after its last."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from mmldlm.checkpoint import CheckpointStore, RunLock, TrainState
from mmldlm.config import RunConfig, write_config
from mmldlm.distributed.exit_files import clear_exit_files, write_exit
from mmldlm.distributed.grad_scaler import check_fp16
from mmldlm.distributed.init import start_engine
from mmldlm.distributed.launcher import LauncherEnv, read_launcher_env
from mmldlm.distributed.optimizers import check_optimizer
from mmldlm.errors import ExitCode, MmldlmError, PeerLostError, exit_code_and_cause
from mmldlm.model.compile import check_compile
from mmldlm.model.flops import ModelFlops, peak_flops
from mmldlm.optim.ema import check_ema
from mmldlm.optim.lr_schedule import Plateau, resolved_warmup
from mmldlm.run.contents import check_resume, choose_checkpoint, identity, metadata_files, restore
from mmldlm.settings.fields import dump
from mmldlm.telemetry import Notices, StepProfiler, StepStats, Tracker
from mmldlm.trainer.auto_batch_size import AutoMicroBatch, check_auto_micro_batch
from mmldlm.trainer.checkpointer import Checkpointer, SavedCheckpoint
from mmldlm.trainer.save_schedule import SaveSchedule
from mmldlm.trainer.setup import (
    build_components,
    check_shared_folder,
    compare_ranks,
    create_run_folder,
    report_lines,
    startup_report,
    step_plan,
    with_latent_stats,
)
from mmldlm.trainer.signals import SignalRequests
from mmldlm.trainer.step_guard import StepGuard, open_skips_file
from mmldlm.utils.files import write_atomically
from mmldlm.utils.malloc import keep_freed_memory

if TYPE_CHECKING:
    from typing_extensions import Self


class RunContext:
    """Context manager of a run: opens and locks its folder, restores its state, and records how it ended.

    Args:
        config: Config of the run.
        launch: Environment of this rank; read from the environment variables by default.
    """

    def __init__(self, config: RunConfig, launch: LauncherEnv | None = None):
        self.config = config
        self.launch = launch or read_launcher_env(os.environ)
        self.run_dir = Path(config.run.dir)
        self._stack = ExitStack()
        self._owns_run_dir = False
        self.state = TrainState()
        self.saved_at: int | None = None
        self._is_warm = False

    def __enter__(self) -> Self:
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
        """Release everything, and write `exit.json` if this run owns the folder, since launchers collapse exit codes.

        Returns:
            The loss of a peer if that is the cause of `error`.
        """
        watchdog = self.runtime.watchdog if hasattr(self, "runtime") else None
        lost = None
        if watchdog is not None and isinstance(error, Exception):
            lost = None if isinstance(error, MmldlmError) else watchdog.diagnose(error)
            self.runtime.peer_lost = isinstance(lost or error, PeerLostError)
        code, cause = exit_code_and_cause(lost or error)
        single = self.launch.world_size == 1 and code != ExitCode.INTERRUPTED
        if hasattr(self, "checkpointer") and (code == ExitCode.NUMERICAL or single):
            # All ranks are here, so the checkpoint in progress, which is older than the error, can be completed.
            with suppress(MmldlmError):
                self.log_checkpoint(self.checkpointer.finish())
        if watchdog is not None and code not in (ExitCode.DONE, ExitCode.STOPPED):
            watchdog.fail(code, cause)
        if self._owns_run_dir:
            with suppress(OSError):  # the disk may be the reason for the end
                write_exit(self.run_dir, self.launch.rank, self.state.step, code, cause)
        self._stack.close()
        return lost

    def _open(self) -> None:
        """Check the settings, start the engine, build the components, lock the run folder and restore the run."""
        config = self.config
        self.notices = self._stack.enter_context(Notices(log_library_warnings=self.launch.local_rank == 0))
        # Checks of settings come before anything is created.
        check_resume(config.resume)
        config.train.check_batches(self.launch.world_size)
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        check_optimizer(config.optim, self.launch.engine, self.launch.offloads_optimizer, device_type)
        check_fp16(config.precision, self.launch.engine, config.distributed.ddp.comm_hook)
        check_ema(config.ema, self.launch.deepspeed)
        check_auto_micro_batch(config.train, self.launch.engine)
        check_compile(config.compile, self.launch.engine)
        if config.memory.keep_freed and device_type == "cpu":
            keep_freed_memory()
        plan = step_plan(config, self.launch.world_size)
        self.runtime = runtime = start_engine(config.distributed, self.launch, plan)
        self._stack.callback(runtime.close)
        with runtime.raise_on_all_ranks("opening of the data"):
            self.components = build_components(config, runtime)
        self.store = self.components.store
        fingerprint = compare_ranks(runtime, config, self.store)
        with runtime.raise_on_all_ranks("opening of the run folder"):
            if runtime.is_main:
                create_run_folder(self.run_dir)
                self._stack.enter_context(RunLock(self.run_dir))
                clear_exit_files(self.run_dir)
        check_shared_folder(runtime, self.run_dir)
        self._owns_run_dir = True
        if runtime.watchdog is not None:
            runtime.watchdog.set_folder(self.run_dir)
        notes = self._restore()
        self._start(notes, fingerprint)

    def _restore(self) -> list[str]:
        """Restore the run from the checkpoint that rank 0 chooses; return notes for the user.

        Weights are loaded before the engine wraps the model, the optimizer's state after it.
        """
        config, runtime = self.config, self.runtime
        self.checkpoints = CheckpointStore(self.run_dir / "checkpoints", config.checkpoint.retention)
        path = None
        with runtime.raise_on_all_ranks("choice of the checkpoint"):
            if runtime.is_main:
                path = choose_checkpoint(self.checkpoints, config)
        path = runtime.gather(path and str(path), "choice of the checkpoint")[0]
        with runtime.raise_on_all_ranks("loading of the checkpoint"):
            restored = restore(path and Path(path), self.components.model, config, self.store)
        self.components = with_latent_stats(restored.latents, self.components, config, runtime)
        self.store = self.components.store
        self.model_flops = ModelFlops.from_model(self.components.model)
        runtime.prepare(self.components.model, self.components.optimizer)
        runtime.check_precision()
        if restored.moments is not None:
            runtime.load_optimizer_state(restored.moments)
            if runtime.is_main:
                self.checkpoints.set_aside_after(restored.state.step)
        if config.ema.decay:
            runtime.enable_ema(restored.ema)
        self.state = restored.state
        if runtime.loss_scale is not None and self.state.loss_scale is not None:
            runtime.loss_scale.restore(self.state.loss_scale, self.state.steps_at_scale)
        else:
            self.state.loss_scale, self.state.steps_at_scale = None, 0
        if config.resume == "auto" and self.state.step:
            self.saved_at = self.state.step  # the checkpoint is one of this run
        self._setup_plateau()
        return restored.notes + self._setup_auto_micro_batch()

    def _setup_plateau(self) -> None:
        """Create the plateau schedule, or clear its state under other values of `schedule.lr`."""
        config, state = self.config, self.state
        self.plateau: Plateau | None = None
        if config.schedule.lr != "plateau":
            state.lr_cuts, state.plateau_best, state.plateau_since, state.plateau_losses = 0, None, 0, []
            return
        warmup = resolved_warmup(config.optim, config.train.steps)
        self.plateau = Plateau(config.schedule, state, warmup, validates=config.validation.every > 0)

    def _setup_auto_micro_batch(self) -> list[str]:
        """Create `AutoMicroBatch`, or clear its state without `train.auto_micro_batch`; return notes for the user."""
        self.auto_micro_batch = None
        if not self.config.train.auto_micro_batch:
            self.state.micro_batch_limit = None
            return []
        components = self.components
        self.auto_micro_batch = AutoMicroBatch(
            self.config.train, self.state, components.objective, self.runtime, components.loader
        )
        limit = self.state.micro_batch_limit
        return [] if limit is None else [f"micro-batches of at most {limit}, since larger ones did not fit into memory"]

    def _start(self, notes: list[str], fingerprint: Mapping[str, str]) -> None:
        """Open everything that a step needs, and write and print the start-up report."""
        config, runtime = self.config, self.runtime
        runtime.model.train()
        self.meter = StepStats()
        self._unscaled = torch.ones((), device=runtime.device)  # the loss scale without fp16
        name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else ""
        self.peak_flops = peak_flops(name, config.precision)
        self.defer_fetch = runtime.device.type != "cpu"  # a CPU's numbers are read without waiting
        self.signals = self._stack.enter_context(SignalRequests())
        self.save_schedule = SaveSchedule(config.checkpoint, self.run_dir, self.signals, runtime.is_main)
        self.checkpointer = Checkpointer(runtime, self.checkpoints, config.checkpoint.async_)
        self._stack.callback(self.checkpointer.close)
        report = startup_report(runtime, config, self.components, fingerprint)
        self.provenance = {key: report[key] for key in ("engine", "world_size", "versions", "git", "data_manifest")}
        self.provenance["identity"] = identity(config, self.store)
        self.metadata_files = metadata_files(config, self.store) if runtime.is_main else {}
        # A run that died before its first checkpoint resumes from step 0; its old records are dropped as well.
        resumed = config.resume != "never" and (self.run_dir / "metrics.jsonl").exists()
        self.tracker = self._stack.enter_context(
            Tracker(self.run_dir, config.train.steps, self.state.step, resumed, runtime.is_main, config.log.tensorboard)
        )
        self.guard = StepGuard(config.guard, self.state)
        self.profiler = StepProfiler(config.profile, self.run_dir, runtime.rank, runtime.device.type)
        self._stack.callback(self.profiler.close)
        if not runtime.is_main:
            return
        self.notices.write = self.tracker.message
        self.guard.file = self._stack.enter_context(open_skips_file(self.run_dir, self.state.step, resumed))
        write_config(config, self.run_dir)
        write_atomically(self.run_dir / "startup.json", (json.dumps(report, indent=1) + "\n").encode())
        splits = self.store.manifest.splits
        self.tracker.start({**report, "samples": {name: split.samples for name, split in splits.items()}}, dump(config))
        lines = [*notes, f"run {self.run_dir}: steps {self.state.step} to {config.train.steps}"]
        print("\n".join(lines + [f"  {line}" for line in report_lines(report)]), flush=True)

    def log_checkpoint(self, checkpoints: list[SavedCheckpoint]) -> None:
        """Log newly completed checkpoints."""
        for saved in checkpoints:
            seconds = {"stall_s": saved.stall_s, "seconds": saved.seconds}
            self.tracker.event("checkpoint", saved.step, {"path": str(saved.path), **seconds})
