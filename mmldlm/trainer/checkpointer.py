"""`Checkpointer`: asynchronous checkpoints of a run.

Training stops only while the state is copied to the host. A thread on each rank then writes that rank's files; when all
ranks have finished, a thread on rank 0 commits them as a checkpoint. The ranks learn of each other's progress from
flags in the all-reduce that every step has anyway.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmldlm.checkpoint import CheckpointStore, tensor_file_name, write_files, write_tensors
from mmldlm.distributed.engine import Engine
from mmldlm.errors import MmldlmError
from mmldlm.utils.files import FileInfo
from mmldlm.utils.partition import partition_by_size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    path: Path | None  # on rank 0
    stall_s: float  # time for which training stopped
    seconds: float  # time from start to commit


@dataclass
class _PendingCheckpoint:
    """A checkpoint in progress: in phase 1 every rank writes its files, in phase 2 rank 0 commits them."""

    step: int
    info: Mapping[str, Any]
    temporary: Path
    task: Future[Any]  # this rank's part of the phase
    started: float
    stall_s: float = 0.0
    committing: bool = False


class Checkpointer:
    """Writer of one checkpoint at a time.

    Its methods are collective except `close`; the properties `ready` and `failed` are local to this rank.
    """

    def __init__(self, runtime: Engine, checkpoints: CheckpointStore, asynchronous: bool):
        self.runtime, self.checkpoints, self.asynchronous = runtime, checkpoints, asynchronous
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging: dict[str, Tensor] = {}
        self._pending: _PendingCheckpoint | None = None

    @property
    def ready(self) -> bool:
        """Return whether this rank has finished its part of the phase."""
        return self._pending is not None and self._pending.task.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Return whether this rank's part of the phase ended with an error."""
        return self._pending is not None and self._pending.task.done() and self._pending.task.exception() is not None

    def start(self, step: int, files: Mapping[str, bytes], info: Mapping[str, Any]) -> list[SavedCheckpoint]:
        """Start a checkpoint of the present state, after waiting for the previous one if it is still being written.

        Args:
            step: Number of optimizer steps of the state.
            files: Contents of small files by name, written by rank 0.
            info: Entries of the checkpoint's manifest.

        Returns:
            Checkpoints that were completed by this call.

        Raises:
            StorageError: there is not enough space, or the previous checkpoint could not be written.
            NumericalError: the previous checkpoint has non-finite numbers.
        """
        started, runtime = time.perf_counter(), self.runtime
        if self._pending is not None and self.asynchronous and runtime.is_main:
            log.warning("step %d: waiting for the checkpoint of step %d, still being written", step, self._pending.step)
        saved = self.finish()
        groups = self._stage()
        needed = sum(runtime.gather(sum(t.nbytes for group in groups.values() for t in group.values()), "size to save"))
        name = ""
        with runtime.raise_on_all_ranks("beginning of the checkpoint"):
            if runtime.is_main:
                name = str(self.checkpoints.begin(step, needed))
        temporary = Path(runtime.gather(name, "name of the checkpoint")[0])
        writers: dict[str, Any] = {
            tensor_file_name(group, runtime.rank, runtime.world_size): partial(write_tensors, tensors=tensors)
            for group, tensors in groups.items()
            if tensors
        }
        task = self._pool.submit(write_files, temporary, {**writers, **(files if runtime.is_main else {})})
        stall_s = time.perf_counter() - started
        self._pending = _PendingCheckpoint(step, info, temporary, task, started, stall_s)
        if not self.asynchronous:
            saved += self.finish()
        return saved

    def advance(self, ready: int, failed: int) -> list[SavedCheckpoint]:
        """Start the next phase if all ranks are ready.

        Args:
            ready: Number of ranks that are `ready`.
            failed: Number of ranks that have `failed`.

        Returns:
            The checkpoint if this completed it.

        Raises:
            MmldlmError: the error of a rank that failed.
        """
        if not failed and ready < self.runtime.world_size:
            return []
        saved = self._finish_phase()
        return [saved] if saved is not None else []

    def finish(self) -> list[SavedCheckpoint]:
        """Wait for the checkpoint in progress and return it."""
        while self._pending is not None:
            saved = self._finish_phase()
            if saved is not None:
                return [saved]
        return []

    def close(self) -> None:
        """Stop the thread without committing; do not wait for it if a peer is lost. Not collective."""
        self._pool.shutdown(wait=not self.runtime.peer_lost, cancel_futures=True)

    def _finish_phase(self) -> SavedCheckpoint | None:
        """Wait for all ranks to finish this phase, then start the next one or return the complete checkpoint."""
        pending, runtime, started = self._pending, self.runtime, time.perf_counter()
        assert pending is not None
        try:
            with runtime.raise_on_all_ranks("writing of the checkpoint"):
                result = pending.task.result()
        except MmldlmError:  # of any rank; no rank is writing any more
            self._pending = None
            if runtime.is_main:
                shutil.rmtree(pending.temporary, ignore_errors=True)
            raise
        if pending.committing:
            self._pending, now = None, time.perf_counter()
            return SavedCheckpoint(pending.step, result, pending.stall_s + now - started, now - pending.started)
        parts = runtime.gather({name: asdict(record) for name, record in result.items()}, "files of the checkpoint")
        records = {name: FileInfo(**record) for part in parts for name, record in part.items()}
        pending.committing = True
        if runtime.is_main:
            pending.task = self._pool.submit(
                self.checkpoints.commit, pending.temporary, pending.step, records, pending.info
            )
        else:
            pending.task = Future()
            pending.task.set_result(None)
        pending.stall_s += time.perf_counter() - started
        return None

    @cached_property
    def _owned(self) -> set[str]:
        """Names of the weights that this rank writes, constant over the run."""
        return set(partition_by_size(self.runtime.sizes(), self.runtime.world_size)[self.runtime.rank])

    def _stage(self) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors that this rank writes to the host; return the copies by group and name.

        The buffers are reused between checkpoints; for tensors on a GPU they are page-locked.
        """
        runtime = self.runtime
        groups: dict[str, dict[str, Tensor]] = {}
        on_cuda = runtime.device.type == "cuda"
        for group, name, tensor in runtime.gather_state(self._owned):
            key, copy = f"{group}/{name}", self._staging.get(f"{group}/{name}")
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = self._staging[key] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=on_cuda)
            groups.setdefault(group, {})[name] = copy
        if on_cuda:
            torch.cuda.synchronize(runtime.device)
        return groups
