"""`Saver`: checkpoints of a run, written beside the training.

The training stands still while the state is copied to the host. A thread on each rank then writes that rank's files;
once all ranks have theirs, a thread of rank 0 makes them a checkpoint. The ranks learn of each other's progress from
flags in an exchange that they have at every step anyway.
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

from mmldlm.checkpoint import CheckpointStore, file_name, write_files, write_tensors
from mmldlm.distributed.engine import Engine
from mmldlm.errors import MmldlmError
from mmldlm.utils.files import FileInfo
from mmldlm.utils.partition import partition_by_size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is there."""

    step: int
    path: Path | None  # on rank 0
    stall_s: float  # how long the training stood still
    seconds: float  # from its beginning until it was there


@dataclass
class _Flight:
    """A checkpoint in the making: first every rank's files, then rank 0's commit of them all."""

    step: int
    info: Mapping[str, Any]
    temporary: Path
    task: Future[Any]
    began: float
    stall_s: float = 0.0
    committing: bool = False


class Saver:
    """Writes one checkpoint at a time. Every method is collective; `ready` and `failed` are this rank's own."""

    def __init__(self, runtime: Engine, checkpoints: CheckpointStore, asynchronous: bool):
        self.runtime, self.checkpoints, self.asynchronous = runtime, checkpoints, asynchronous
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging: dict[str, Tensor] = {}
        self._flight: _Flight | None = None

    @property
    def ready(self) -> bool:
        """Whether this rank has done its part of what is in the making."""
        return self._flight is not None and self._flight.task.done() and not self.failed

    @property
    def failed(self) -> bool:
        return self._flight is not None and self._flight.task.done() and self._flight.task.exception() is not None

    def start(self, step: int, files: Mapping[str, bytes], info: Mapping[str, Any]) -> list[Saved]:
        """Begin a checkpoint of the state as it is now, with rank 0's small `files`; what is complete since.

        One that is still in the making is waited for first.

        Raises:
            StorageError: there is no room for it, or the one before could not be written.
            NumericalError: the one before had numbers that are not finite.
        """
        began, runtime = time.perf_counter(), self.runtime
        if self._flight is not None and self.asynchronous and runtime.is_main:
            log.warning("step %d: waiting for the checkpoint of step %d, still being written", step, self._flight.step)
        saved = self.finish()
        groups = self._stage()
        needed = sum(runtime.gather(sum(t.nbytes for group in groups.values() for t in group.values()), "size to save"))
        name = ""
        with runtime.raise_on_all_ranks("beginning of the checkpoint"):
            if runtime.is_main:
                name = str(self.checkpoints.begin(step, needed))
        temporary = Path(runtime.gather(name, "name of the checkpoint")[0])
        own: dict[str, Any] = {
            file_name(group, runtime.rank, runtime.world_size): partial(write_tensors, tensors=tensors)
            for group, tensors in groups.items()
            if tensors
        }
        task = self._pool.submit(write_files, temporary, {**own, **(files if runtime.is_main else {})})
        self._flight = _Flight(step, info, temporary, task, began, stall_s=time.perf_counter() - began)
        if not self.asynchronous:
            saved += self.finish()
        return saved

    def advance(self, ready: int, failed: int) -> list[Saved]:
        """Go on where `ready` ranks have done their part; raises where one of them has `failed`."""
        if not failed and ready < self.runtime.world_size:
            return []
        saved = self._end_phase()
        return [saved] if saved is not None else []

    def finish(self) -> list[Saved]:
        """Wait for what is in the making."""
        while self._flight is not None:
            saved = self._end_phase()
            if saved is not None:
                return [saved]
        return []

    def close(self) -> None:
        """Not collective: let the thread end, whatever becomes of its files; with a peer lost there is no time."""
        self._pool.shutdown(wait=not self.runtime.peer_lost, cancel_futures=True)

    def _end_phase(self) -> Saved | None:
        """Wait for every rank's part of this phase and begin the next; the checkpoint where it was the last."""
        flight, runtime, waited = self._flight, self.runtime, time.perf_counter()
        assert flight is not None
        try:
            with runtime.raise_on_all_ranks("writing of the checkpoint"):
                result = flight.task.result()
        except MmldlmError:  # of any rank; by now none writes any more
            self._flight = None
            if runtime.is_main:
                shutil.rmtree(flight.temporary, ignore_errors=True)
            raise
        if flight.committing:
            self._flight, now = None, time.perf_counter()
            return Saved(flight.step, result, flight.stall_s + now - waited, now - flight.began)
        parts = runtime.gather({name: asdict(record) for name, record in result.items()}, "files of the checkpoint")
        records = {name: FileInfo(**record) for part in parts for name, record in part.items()}
        flight.committing = True
        if runtime.is_main:
            flight.task = self._pool.submit(
                self.checkpoints.commit, flight.temporary, flight.step, records, flight.info
            )
        else:
            flight.task = Future()
            flight.task.set_result(None)
        flight.stall_s += time.perf_counter() - waited
        return None

    @cached_property
    def _owned(self) -> set[str]:
        """Names of the weights that this rank writes, throughout the run."""
        return set(partition_by_size(self.runtime.sizes(), self.runtime.world_size)[self.runtime.rank])

    def _stage(self) -> dict[str, dict[str, Tensor]]:
        """Copies on the host of the tensors that this rank writes, by group; page-locked where they come from a GPU."""
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
