"""`RunContext`: what a run opens before its first step, and leaves behind after its last."""

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
from mmldlm.distributed.init import start
from mmldlm.distributed.launcher import LauncherEnv, read_launcher_env
from mmldlm.distributed.optimizers import check_optimizer
from mmldlm.errors import ExitCode, MmldlmError, PeerLostError, outcome
from mmldlm.model.compile import check_compile
from mmldlm.model.flops import UsefulFlops, peak_flops
from mmldlm.optim.ema import check_ema
from mmldlm.optim.lr_schedule import Plateau, resolved_warmup
from mmldlm.run.contents import check_resume, choose, identity, metadata_files, restore
from mmldlm.settings.fields import dump
from mmldlm.telemetry import Notices, StepProfiler, StepStats, Tracker
from mmldlm.trainer.auto_batch_size import AutoMicroBatch, check_auto_micro_batch
from mmldlm.trainer.checkpointer import Saved, Saver
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
from mmldlm.trainer.step_guard import Guard, skips_file
from mmldlm.utils.files import write_atomically
from mmldlm.utils.malloc import keep_freed_memory

if TYPE_CHECKING:
    from typing_extensions import Self


class RunContext:
    """Context manager around a run: opens and locks its folder, restores it, and leaves it complete."""

    def __init__(self, config: RunConfig, launch: LauncherEnv | None = None):
        self.config = config
        self.launch = launch or read_launcher_env(os.environ)
        self.run_dir = Path(config.run.dir)
        self._stack = ExitStack()
        self._holds_run = False
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
        """Leave `exit.json`, since launchers collapse exit codes; only whoever holds the run may.

        Returns the loss of a peer where that is what stands behind `error`.
        """
        watchdog = self.runtime.watchdog if hasattr(self, "runtime") else None
        lost = None
        if watchdog is not None and isinstance(error, Exception):
            lost = None if isinstance(error, MmldlmError) else watchdog.diagnose(error)
            self.runtime.peer_lost = isinstance(lost or error, PeerLostError)
        code, cause = outcome(lost or error)
        alone = self.launch.world_size == 1 and code != ExitCode.INTERRUPTED
        if hasattr(self, "saver") and (code == ExitCode.NUMERICAL or alone):
            with suppress(MmldlmError):  # all ranks are here: what was good before the fault is kept
                self.log_checkpoint(self.saver.finish())
        if watchdog is not None and code not in (ExitCode.DONE, ExitCode.STOPPED):
            watchdog.fail(code, cause)
        if self._holds_run:
            with suppress(OSError):  # the disk may be what ended the run
                write_exit(self.run_dir, self.launch.rank, self.state.step, code, cause)
        self._stack.close()
        return lost

    def _open(self) -> None:
        config = self.config
        self.notices = self._stack.enter_context(Notices(speaks=self.launch.local_rank == 0))
        # All that can be refused is refused before anything is created.
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
        self.runtime = runtime = start(config.distributed, self.launch, plan)
        self._stack.callback(runtime.close)
        with runtime.raise_on_all_ranks("opening of the data"):
            self.parts = build_components(config, runtime)
        self.store = self.parts.store
        fingerprint = compare_ranks(runtime, config, self.store)
        with runtime.raise_on_all_ranks("opening of the run folder"):
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
        self.checkpoints = CheckpointStore(self.run_dir / "checkpoints", config.checkpoint.retention)
        chosen = None
        with runtime.raise_on_all_ranks("choice of the checkpoint"):
            if runtime.is_main:
                chosen = choose(self.checkpoints, config)
        chosen = runtime.gather(chosen and str(chosen), "choice of the checkpoint")[0]
        with runtime.raise_on_all_ranks("loading of the checkpoint"):
            restored = restore(chosen and Path(chosen), self.parts.model, config, self.store)
        self.parts = with_latent_stats(restored.latents, self.parts, config, runtime)
        self.store = self.parts.store
        self.useful_flops = UsefulFlops.of(self.parts.model)
        runtime.prepare(self.parts.model, self.parts.optimizer)
        runtime.check_precision()
        if restored.moments is not None:
            runtime.load_optimizer_state(restored.moments)
            if runtime.is_main:
                self.checkpoints.set_aside_after(restored.state.step)
        if config.ema.decay:
            runtime.keep_average(restored.average)
        self.state = restored.state
        if runtime.loss_scale is not None and self.state.loss_scale is not None:
            runtime.loss_scale.go_on(self.state.loss_scale, self.state.steps_at_scale)
        else:
            self.state.loss_scale, self.state.steps_at_scale = None, 0
        if config.resume == "auto" and self.state.step:
            self.saved_at = self.state.step  # it came from this very folder
        self._follow_loss()
        return restored.notes + self._limit_micro_batches()

    def _follow_loss(self) -> None:
        """Without `schedule.lr: plateau`, what the run has learned of its loss before is forgotten."""
        config, state = self.config, self.state
        self.plateau: Plateau | None = None
        if config.schedule.lr != "plateau":
            state.lr_cuts, state.plateau_best, state.plateau_since, state.plateau_losses = 0, None, 0, []
            return
        warmup = resolved_warmup(config.optim, config.train.steps)
        self.plateau = Plateau(config.schedule, state, warmup, validates=config.validation.every > 0)

    def _limit_micro_batches(self) -> list[str]:
        """Without `train.auto_micro_batch`, what the run has learned of micro-batches before is forgotten."""
        self.auto_micro_batch = None
        if not self.config.train.auto_micro_batch:
            self.state.micro_batch_limit = None
            return []
        parts = self.parts
        self.auto_micro_batch = AutoMicroBatch(
            self.config.train, self.state, parts.objective, self.runtime, parts.loader
        )
        limit = self.state.micro_batch_limit
        return [] if limit is None else [f"micro-batches of at most {limit}, since larger ones did not fit into memory"]

    def _begin(self, notes: list[str], fingerprint: Mapping[str, str]) -> None:
        config, runtime = self.config, self.runtime
        runtime.model.train()
        self.meter = StepStats()
        self._unscaled = torch.ones((), device=runtime.device)  # the loss scale without fp16
        name = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else ""
        self.peak_flops = peak_flops(name, config.precision)
        self.defer_fetch = runtime.device.type != "cpu"  # there what a step came to is read without a wait
        self.signals = self._stack.enter_context(SignalRequests())
        self.save_schedule = SaveSchedule(config.checkpoint, self.run_dir, self.signals, runtime.is_main)
        self.saver = Saver(runtime, self.checkpoints, config.checkpoint.async_)
        self._stack.callback(self.saver.close)
        report = startup_report(runtime, config, self.parts, fingerprint)
        self.provenance = {key: report[key] for key in ("engine", "world_size", "versions", "git", "data_manifest")}
        self.provenance["identity"] = identity(config, self.store)
        self.metadata_files = metadata_files(config, self.store) if runtime.is_main else {}
        # A run that died before its first checkpoint goes on from step 0: its records are dropped likewise.
        resumed = config.resume != "never" and (self.run_dir / "metrics.jsonl").exists()
        self.tracker = self._stack.enter_context(
            Tracker(self.run_dir, config.train.steps, self.state.step, resumed, runtime.is_main, config.log.tensorboard)
        )
        self.guard = Guard(config.guard, self.state)
        self.profiler = StepProfiler(config.profile, self.run_dir, runtime.rank, runtime.device.type)
        self._stack.callback(self.profiler.close)
        if not runtime.is_main:
            return
        self.notices.write = self.tracker.message
        self.guard.file = self._stack.enter_context(skips_file(self.run_dir, self.state.step, resumed))
        write_config(config, self.run_dir)
        write_atomically(self.run_dir / "startup.json", (json.dumps(report, indent=1) + "\n").encode())
        splits = self.store.manifest.splits
        self.tracker.start({**report, "samples": {name: split.samples for name, split in splits.items()}}, dump(config))
        lines = [*notes, f"run {self.run_dir}: steps {self.state.step} to {config.train.steps}"]
        print("\n".join(lines + [f"  {line}" for line in report_lines(report)]), flush=True)

    def log_checkpoint(self, checkpoints: list[Saved]) -> None:
        """Tell of checkpoints that are there now."""
        for saved in checkpoints:
            seconds = {"stall_s": saved.stall_s, "seconds": saved.seconds}
            self.tracker.event("checkpoint", saved.step, {"path": str(saved.path), **seconds})
