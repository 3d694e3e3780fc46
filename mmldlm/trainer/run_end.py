"""`RunEnd`: closes the parts of a run at its end, and records how the run ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from mmldlm.config import RunConfig
from mmldlm.data.store import Store
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.exit_files import write_exit
from mmldlm.distributed.launch import LauncherEnv
from mmldlm.distributed.memory_probe import is_out_of_memory
from mmldlm.distributed.notify import Notifier
from mmldlm.errors import ConfigError, ExitCode, MmldlmError, StorageError, exit_code_and_cause
from mmldlm.telemetry.profiler import write_memory_history
from mmldlm.telemetry.resources import MIB
from mmldlm.trainer.memory import Sharding, estimate, rank_memory
from mmldlm.utils.files import is_at
from mmldlm.utils.short_repr import truncate


class RunEnd(ExitStack):
    """The open parts of a run. They are closed in reverse, and a start may fail before any of them exists."""

    def __init__(self, run_dir: Path, launch: LauncherEnv, notifier: Notifier):
        super().__init__()
        self._run_dir, self._launch, self.notifier = run_dir, launch, notifier
        self.callback(notifier.wait)  # the last action
        self._engine: Engine | None = None
        self._owned_dir: int | None = None  # open descriptor of the run folder
        self._fetch: Callable[[], None] | None = None
        self._finish: Callable[[], None] | None = None

    def own_engine(self, engine: Engine) -> None:
        """Close this engine at the end, and let it diagnose errors."""
        self._engine = engine
        self.callback(engine.close)
        if engine.watchdog is not None:
            engine.watchdog.notifier = self.notifier

    def own_folder(self) -> None:
        """Write `exit.json` to the run folder at the end. Rank 0 holds the folder's lock, and all ranks see it."""
        self._owned_dir = os.open(self._run_dir, os.O_RDONLY)
        self.callback(os.close, self._owned_dir)
        if self._engine is not None and self._engine.watchdog is not None:
            self._engine.watchdog.folder = self._run_dir

    def own_records(self, fetch: Callable[[], None], finish: Callable[[], None]) -> None:
        """Register the last actions: `fetch` reads pending numbers, `finish` completes a checkpoint in progress."""
        self._fetch, self._finish = fetch, finish

    def end(self, error: BaseException | None, config: RunConfig, step: int) -> None:
        """Close all parts, and write `exit.json` if this run owns its folder: launchers collapse exit codes.

        If `error` comes from a lost peer, from memory that ran out or from a missing run folder, that cause is raised.
        """
        engine = self._engine
        lost: MmldlmError | None = None
        if engine is not None and isinstance(error, Exception):
            lost = _out_of_memory(error, config, step, self._launch, engine) if is_out_of_memory(error) else None
            lost = engine.diagnose(lost or error) or lost
        owns_dir = self._owned_dir is not None and is_at(self._owned_dir, self._run_dir)
        if isinstance(error, FileNotFoundError) and self._owned_dir is not None and not owns_dir:
            lost = StorageError(f"{self._run_dir} was moved or deleted while the run wrote to it")
        code, cause = exit_code_and_cause(lost or error)
        single = self._launch.world_size == 1 and code != ExitCode.INTERRUPTED
        if self._fetch is not None and single:
            with suppress(Exception):  # a failed device has no numbers
                self._fetch()
        if self._finish is not None and (code == ExitCode.NUMERICAL or single):
            # All ranks are here, and the checkpoint in progress is older than the error: complete it.
            with suppress(MmldlmError):
                self._finish()
        if engine is not None and engine.watchdog is not None:
            if not owns_dir:
                engine.watchdog.folder = None
            if code not in (ExitCode.DONE, ExitCode.STOPPED):
                engine.watchdog.fail(code, cause)
        if owns_dir:
            write_exit(self._run_dir, self._launch.rank, step, code, cause)
        self.notifier.start(step, code, cause)
        # Do this last: it releases the lock, and then another run may own the folder.
        self.close()
        self._engine = self._fetch = self._finish = None  # break cycles, which would keep network and loader in memory
        if lost is not None:
            raise lost from error


def _out_of_memory(error: Exception, config: RunConfig, step: int, launch: LauncherEnv, engine: Engine) -> ConfigError:
    train = config.train
    size = train.batch_at(step, launch.world_size)
    key = "micro_batch_tokens" if size.micro_batch_tokens else "micro_batch_size"
    auto = "" if train.auto_micro_batch or engine.shards_parameters else ", or set train.auto_micro_batch=true"
    return ConfigError(
        f"train.{key}: rank {launch.rank} ran out of memory after step {step:,} with {getattr(size, key):,}; lower it, "
        f"which changes no curve{auto}, or set memory.activation_checkpointing=full "
        f"({truncate(' '.join(str(error).split()))}){_memory_history(config, launch, engine)}"
    )


def _memory_history(config: RunConfig, launch: LauncherEnv, engine: Engine) -> str:
    """Write a snapshot of GPU memory if the run remembers allocations. Return the end of the message."""
    if not config.profile.memory_history or engine.device.type != "cuda":
        return ""
    try:
        written = write_memory_history(Path(config.run.dir), launch.rank)
        needed = estimate(config, Store.open(config.data.path), launch.world_size).step
        peak = rank_memory(needed, Sharding(engine.name, config.precision, launch.world_size, launch.replicas)).peak
    except Exception as failure:  # must not hide that memory ran out
        return f"; profile.memory_history: {truncate(str(failure))}"
    used = torch.cuda.max_memory_allocated(engine.device) / MIB
    return f"; {used:,.0f} MiB at the peak, {peak:,.0f} by the estimate; {written} has all allocations"
