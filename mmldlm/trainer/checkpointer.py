"""`Checkpointer`: decides when a checkpoint is due, and writes checkpoints in the background.

Training stops only while the state is copied to the host. Then a thread on each rank writes the rank's files. When all
ranks have finished, a thread on rank 0 commits the files as a checkpoint. Ranks learn about each other's progress from
flags in the all-reduce that every step has anyway.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmldlm.checkpoint.manifest import MANIFEST
from mmldlm.checkpoint.slices import SlicedTensor, TensorGroup, tensor_file_name
from mmldlm.checkpoint.state import TrainState
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.checkpoint.tensors import write_tensors
from mmldlm.config import RunConfig, with_absolute_paths
from mmldlm.data.store import Store
from mmldlm.errors import MmldlmError
from mmldlm.loading.compatibility import LATENTS_NAME, identity
from mmldlm.settings.fields import to_yaml
from mmldlm.telemetry.tracker import Tracker
from mmldlm.trainer.restore import RestoredRun
from mmldlm.trainer.setup import Components
from mmldlm.trainer.signals import SignalRequests
from mmldlm.utils.files import FileInfo, sha256

log = logging.getLogger(__name__)

BLOCK_BYTES = 64 * 2**20  # size of a block of page-locked memory
ALIGNMENT = 64  # of a buffer in a block, in bytes
REQUEST_POLL_INTERVAL_S = 1.0  # not more often, because a look-up on a network file system is slow
# Keys of the start-up report that every checkpoint stores.
PROVENANCE = ("run_id", "engine", "world_size", "versions", "git", "data_manifest", "init")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    step: int
    path: Path  # only rank 0 knows it
    stall_s: float  # how long training stopped
    seconds: float  # time from start to commit


@dataclass
class _PendingCheckpoint:
    """A checkpoint in progress. In phase 1 every rank writes its files, and in phase 2 rank 0 commits them."""

    step: int
    info: Mapping[str, Any]
    tensors: Mapping[str, TensorGroup]
    temporary: Path
    task: Future[Any]  # this rank's part of the phase
    started: float
    stall_s: float = 0.0
    committing: bool = False


class Checkpointer:
    """Writes the checkpoints of a run, one at a time. A user can ask for one by SIGUSR1.

    All methods are collective, except `save_requested`, `record`, `close` and the properties. Each checkpoint
    stores some keys of `report`, the start-up report.
    """

    def __init__(
        self, components: Components, restored: RestoredRun, report: Mapping[str, Any], signals: SignalRequests
    ):
        config, engine, data = components.config, components.engine, components.store
        self.config, self.engine, self.signals, self.mirror = config, engine, signals, restored.mirror
        run_dir = Path(config.run.dir)
        self.store = CheckpointStore(run_dir / "checkpoints", config.checkpoint.retention)
        # Step of the newest checkpoint, complete or in progress. With `resume: auto` a run may start from one.
        self.saved_at = restored.state.step if config.resume == "auto" and restored.state.step else None
        self._info = {key: report[key] for key in PROVENANCE} | {"identity": identity(config, data)}
        self._files = metadata_files(config, data) if engine.is_main else {}
        self._request = run_dir / "CHECKPOINT"  # users create this file to ask for a checkpoint, which removes it
        self._save_time = self._poll_time = time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging: dict[str, Tensor] = {}
        self._block = torch.empty(0, dtype=torch.uint8)  # the unused rest of a page-locked block
        self._pending: _PendingCheckpoint | None = None
        if self.mirror is not None and self.saved_at is not None:
            self.mirror.request(self.saved_at)

    # --- when to save --------------------------------------------------------------------------------------

    def save_requested(self) -> bool:
        """Return whether SIGUSR1 came or, on rank 0, the file `CHECKPOINT` exists or time is up."""
        minutes = self.config.checkpoint.every_minutes
        is_due = minutes is not None and time.monotonic() - self._save_time >= 60 * minutes
        return self.signals.save or (self.engine.is_main and (is_due or self._file_requested()))

    def _file_requested(self) -> bool:
        now = time.monotonic()
        if now - self._poll_time < REQUEST_POLL_INTERVAL_S:
            return False
        self._poll_time = now
        return self._request.exists()

    # --- writing -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether this rank has finished its part of the phase without an error."""
        return self._pending is not None and self._pending.task.done() and not self.failed

    @property
    def failed(self) -> bool:
        """Return whether this rank's part of the phase ended with an error."""
        return self._pending is not None and self._pending.task.done() and self._pending.task.exception() is not None

    def save(self, state: TrainState, validation_loss: float | None = None) -> list[SavedCheckpoint]:
        """Start a checkpoint of the present state. If the previous one is still being written, wait for it first.

        Return the checkpoints that this call completed. A low `validation_loss` may make a checkpoint one of the best.

        Raises:
            StorageError: There is not enough space, or the previous checkpoint could not be written.
            NumericalError: The previous checkpoint has non-finite numbers.
        """
        started, engine, step = time.perf_counter(), self.engine, state.step
        asynchronous = self.config.checkpoint.async_
        if self._pending is not None and asynchronous and engine.is_main:
            log.warning("step %d: waiting for the checkpoint of step %d, still being written", step, self._pending.step)
        # Finish the previous checkpoint first, because its writer reads buffers that `_stage` overwrites.
        saved = self.finish()
        tensors, groups = self._stage()
        needed = sum(engine.gather(sum(t.nbytes for group in groups.values() for t in group.values()), "size to save"))
        with engine.raise_on_all_ranks("beginning of the checkpoint"):
            name = str(self.store.begin(step, needed)) if engine.is_main else ""
        temporary = Path(engine.gather(name, "name of the checkpoint")[0])
        writers: dict[str, Any] = {
            tensor_file_name(group, engine.writer, engine.num_writers): partial(write_tensors, tensors=parts)
            for group, parts in groups.items()
            if engine.writer is not None
        }
        if engine.is_main:
            # Serialize now, because training goes on and changes the state while the thread writes.
            writers |= {**self._files, "state.json": state.to_json().encode()}
            self._request.unlink(missing_ok=True)
        task = self._pool.submit(write_files, temporary, writers)
        info = {**self._info, "validation_loss": validation_loss, "overfitting": state.overfitting()}
        stall_s = time.perf_counter() - started
        self._pending = _PendingCheckpoint(step, info, tensors, temporary, task, started, stall_s)
        if not asynchronous:
            saved += self.finish()
        self.saved_at = step
        self._save_time = time.monotonic()
        self.signals.save = False
        return saved

    def advance(self, ready: int, failed: int) -> list[SavedCheckpoint]:
        """Start the next phase if all ranks are ready. Return the checkpoint if this call completed it.

        `ready` and `failed` are numbers of ranks. If a rank has failed, its error is raised.
        """
        if not failed and ready < self.engine.world_size:
            return []
        # All ranks get the same two sums, so they all enter this collective in the same step.
        return self._finish_phase()

    def finish(self) -> list[SavedCheckpoint]:
        """Wait for the checkpoint in progress and return it."""
        saved: list[SavedCheckpoint] = []
        while self._pending is not None:
            saved = self._finish_phase()
        return saved

    def record(self, saved: Sequence[SavedCheckpoint], tracker: Tracker) -> None:
        """Log complete checkpoints, request copies to the mirror, and log finished copies (not collective)."""
        for checkpoint in saved if self.engine.is_main else ():
            seconds = {"stall_s": checkpoint.stall_s, "seconds": checkpoint.seconds}
            tracker.event("checkpoint", checkpoint.step, {**checkpoint_record(checkpoint.path), **seconds})
            if self.mirror is not None:
                self.mirror.request(checkpoint.step)
        if self.mirror is not None:
            self.mirror.poll(partial(tracker.event, "mirror"))

    def finish_mirror(self, tracker: Tracker) -> None:
        """Wait until the mirror has the last checkpoint, but at most `checkpoint.mirror_wait_s`."""
        if not self.config.checkpoint.mirror:
            return
        tracker.heartbeat(self.saved_at or 0, "copying to the mirror")
        deadline = time.monotonic() + self.config.checkpoint.mirror_wait_s
        # Wait in short collectives, because a long one would count as a hang.
        while self.engine.gather(self.mirror is not None and self.mirror.busy, "copy to the mirror")[0]:
            if self.mirror is not None:
                self.mirror.wait(deadline, partial(tracker.event, "mirror"))

    def close(self) -> None:
        """Stop the thread without a commit, and do not wait for it if a peer is lost (not collective)."""
        self._pool.shutdown(wait=not self.engine.peer_lost, cancel_futures=True)
        if self.mirror is not None:
            self.mirror.close()

    def _finish_phase(self) -> list[SavedCheckpoint]:
        """Wait until all ranks have finished this phase. Then start the next one, or return the complete checkpoint."""
        pending, engine, started = self._pending, self.engine, time.perf_counter()
        assert pending is not None
        try:
            with engine.raise_on_all_ranks("writing of the checkpoint"):
                result = pending.task.result()
        except MmldlmError:  # some rank failed, and no rank is writing any more
            self._pending = None
            if engine.is_main:
                shutil.rmtree(pending.temporary, ignore_errors=True)
            raise
        if pending.committing:
            self._pending, now = None, time.perf_counter()
            return [SavedCheckpoint(pending.step, result, pending.stall_s + now - started, now - pending.started)]
        # End of phase 1. For the manifest, rank 0 needs size and hash of every rank's files.
        parts = engine.gather({name: asdict(record) for name, record in result.items()}, "files of the checkpoint")
        records = {name: FileInfo(**record) for part in parts for name, record in part.items()}
        pending.committing = True
        if engine.is_main:
            contents = records, pending.info, pending.tensors
            pending.task = self._pool.submit(self.store.commit, pending.temporary, pending.step, *contents)
        else:
            # The other ranks have nothing to do in phase 2 and are ready at once.
            pending.task = Future()
            pending.task.set_result(None)
        pending.stall_s += time.perf_counter() - started
        return []

    def _stage(self) -> tuple[dict[str, TensorGroup], dict[str, dict[str, Tensor]]]:
        """Copy this rank's slices to the host. Return descriptions of all tensors, and the copies, by group.

        Checkpoints share the same buffers. For tensors on a GPU, the buffers are page-locked.
        """
        engine = self.engine
        tensors: dict[str, dict[str, SlicedTensor]] = {}
        copies: dict[str, dict[str, Tensor]] = {}
        on_cuda = engine.device.type == "cuda"
        for group, name, sliced, part in engine.local_state():
            tensors.setdefault(group, {})[name] = sliced
            start, stop = (0, 0) if engine.writer is None else sliced.slice_in(engine.writer)
            if start == stop:
                continue
            assert part.numel() == stop - start, f"{name}: {part.numel()} elements for a slice of {stop - start}"
            part, key = part.reshape(sliced.slice_shape(start, stop)), f"{group}/{name}"
            copy = self._staging.get(key)
            if copy is None or copy.shape != part.shape or copy.dtype != part.dtype:
                copy = self._staging[key] = self._host_buffer(part)
            copy.copy_(part, non_blocking=on_cuda)
            copies.setdefault(group, {})[name] = copy
        # Copies to page-locked memory return early. The writer must not start before they are done.
        if on_cuda:
            torch.cuda.synchronize(engine.device)
        return {group: TensorGroup(engine.num_writers, entries) for group, entries in tensors.items()}, copies

    def _host_buffer(self, part: Tensor) -> Tensor:
        """Return host memory for a copy of `part`. It is page-locked if `part` is on a GPU.

        Tensors share blocks: each call that locks pages takes milliseconds, and rounds up to a power of two.
        """
        if not part.is_cuda:
            return torch.empty_like(part, device="cpu")
        size = -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        if size > BLOCK_BYTES:
            return torch.empty_like(part, device="cpu", pin_memory=True)
        if len(self._block) < size:
            self._block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        buffer, self._block = self._block.split([size, len(self._block) - size])
        # numpy gives it its own storage. If tensors shared a storage, the writer would copy all but the first.
        return torch.from_numpy(buffer.numpy()[: part.nbytes]).view(part.dtype).view(part.shape)


def metadata_files(config: RunConfig, store: Store) -> dict[str, bytes]:
    """Return the checkpoint files other than tensors and `state.json`, by name. They never change in a run."""
    tokenizer = sorted(path for path in (store.path / "tokenizer").iterdir() if path.is_file())
    return {
        "config.yaml": to_yaml(with_absolute_paths(config)).encode(),
        LATENTS_NAME: json.dumps(asdict(store.manifest.latent)).encode(),
        **{f"tokenizer/{path.name}": path.read_bytes() for path in tokenizer},
    }


def checkpoint_record(path: Path) -> dict[str, str]:
    """Return path and hash of a checkpoint for records. We hash the manifest, since it has the hashes of all files."""
    return {"path": str(path), "sha256": sha256(path / MANIFEST)}
