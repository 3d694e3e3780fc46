"""Copy a run's checkpoints to another disk or an object store, through fsspec.

Each `step-00000100/` in a mirror is a run folder with one checkpoint. The checkpoint's manifest, which has the hashes
of its files, is written last and removed first. So a folder without a manifest is an interrupted copy. We rename
nothing, because object stores cannot rename.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mmldlm.checkpoint.manifest import Checkpoint, check_name, verify_checkpoint
from mmldlm.checkpoint.names import MANIFEST, checkpoint_name, step_and_revision
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.errors import ConfigError, DataError, StorageError
from mmldlm.utils.files import fsync, make_folder
from mmldlm.utils.printable import hide_passwords
from mmldlm.utils.short_repr import truncate
from mmldlm.utils.versions import install_command

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
_POLL_INTERVAL_S = 0.2
_MAX_ERROR_CHARACTERS = 300

log = logging.getLogger(__name__)


class Mirror:
    """Copies the checkpoints of one run, on rank 0, since all ranks share the run folder.

    A thread makes one pass at a time. `poll` starts it and reports its outcome. A run is recognized by its first
    record. Raises `ConfigError` if the mirror is the run folder itself.

    Args:
        place: Folder or URL. The copies are in its subfolder with the name of the run folder.
        store: The run's checkpoints. Its retention policy also holds for the copies.
        files: Files of the run folder to copy with each checkpoint, including the metrics.
    """

    def __init__(self, place: str, store: CheckpointStore, files: Sequence[str]):
        self.store, self.files = store, files
        self.run_dir = store.folder.parent.absolute()
        self.url = f"{place.rstrip('/')}/{self.run_dir.name}"
        if Path(self.url.removeprefix("file://")).resolve() == self.run_dir.resolve():
            raise ConfigError(f"checkpoint.mirror: expected another disk, found {place}, where run.dir is")
        self._writer = uuid.uuid4().hex.encode()  # identifies this start in the mirror
        self._is_claimed = False
        self._due: int | None = None  # step of the newest checkpoint that no pass has handled yet
        self._pass: Future[tuple[int, dict[str, Any]]] | None = None
        self._closed = Event()

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """Return the fsspec file system and the mirror's path in it. Imports the object store's package."""
        import fsspec

        # Without a cache of listings, since another process may write as well.
        return fsspec.core.url_to_fs(self.url, use_listings_cache=False)

    @property
    def _system(self) -> Any:
        return self._place[0]

    # --- at the start --------------------------------------------------------------------------------------

    def fetch_newer(self, local: Checkpoint | None, is_chosen: bool) -> Checkpoint | None:
        """Fetch the newest intact copy and its run's files if it is newer than `local`, otherwise return `local`.

        `local` is the checkpoint that the run would start from, or None on an empty disk.

        Raises:
            ConfigError: The mirror has another run, or is ahead of a start that the user has chosen.
            DataError: The disk is empty and all copies are damaged.
            StorageError: The disk is empty and the mirror cannot be read.
        """
        started, folder = time.monotonic(), self.run_dir / f".{CHECKPOINTS}.tmp"
        try:
            fetched = self._fetch(-1 if local is None else local.step, is_chosen, folder)
            self._claim()
        except (ConfigError, DataError) as error:
            raise type(error)(f"checkpoint.mirror: {error}") from None
        except Exception as error:  # those of the libraries are of many kinds
            if local is None and not is_chosen:
                line = self._line(error)
                raise StorageError(
                    f"checkpoint.mirror: cannot be read, and without it the run would start over: {line}"
                ) from error
            log.warning("checkpoint.mirror: cannot look for newer checkpoints: %s", self._line(error))
            return local
        if fetched is None:
            return local
        # Move the checkpoint last: after a kill in between, the next start fetches everything again.
        for path in folder.iterdir():
            target = self.run_dir / path.name
            if path.name != CHECKPOINTS:
                if target.is_dir():
                    shutil.rmtree(target)
                path.rename(target)
        path = self.store.publish(fetched.path, fetched.step)
        shutil.rmtree(folder)
        print(f"fetched {path.name} from {self.url} in {time.monotonic() - started:.1f} s", flush=True)
        return replace(fetched, path=path)

    def _fetch(self, step: int, is_chosen: bool, folder: Path) -> Checkpoint | None:
        """Fetch the newest intact copy after `step`, if any, into `folder`, which becomes a run folder."""
        problems: dict[int, DataError] = {}
        fetched = None
        for copy in self._copies(newest=step if is_chosen else None, may_adopt=step < 0):
            if copy <= step:
                break
            shutil.rmtree(folder, ignore_errors=True)
            try:
                fetched = self._get(copy, folder)
                break
            except DataError as error:
                log.warning("checkpoint.mirror: %s; trying an older copy", error)
                problems[copy] = error
        if problems and fetched is None and step < 0:
            raise DataError(f"no good copy in {self.url}: {next(iter(problems.values()))}")
        for damaged in problems:
            self._system.rm_file(self._manifest(damaged))  # forget the damaged copy, so that it is copied again
        return fetched

    def _get(self, step: int, folder: Path) -> Checkpoint:
        """Fetch a copy and verify its checkpoint, since we do not trust the mirror."""
        for source in self._system.find(self._folder(step)):
            name = source.removeprefix(f"{self._folder(step)}/")
            if name.partition("/")[0] in (*self.files, CHECKPOINTS):
                check_name(name)
                make_folder((folder / name).parent)
                self._system.get_file(source, str(folder / name))
                (folder / name).chmod(0o600)
                fsync(folder / name)
        return verify_checkpoint(folder / CHECKPOINTS / checkpoint_name(step))

    # --- during the run ------------------------------------------------------------------------------------

    def request(self, step: int) -> None:
        """Request a copy of the complete checkpoint of `step`."""
        self._due = step

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being copied or waits for a copy."""
        return self._pass is not None or self._due is not None

    def poll(self, record: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Record the outcome of a finished pass, and start the next one if it is due."""
        if self._pass is not None and self._pass.done():
            outcome, self._pass = self._pass, None
            record(*outcome.result())
        if self._pass is None and self._due is not None:
            outcome, step = Future(), self._due
            self._pass, self._due = outcome, None
            # A daemon thread, so that the process can end without waiting for it.
            Thread(target=lambda: outcome.set_result((step, self._try_to_copy())), name="mirror", daemon=True).start()

    def wait(self, deadline: float, record: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Wait until not `busy`, a moment at a time. At `deadline`, give the last copy up."""
        if self._pass is not None:
            wait_for([self._pass], _POLL_INTERVAL_S)
        self.poll(record)
        if self.busy and time.monotonic() >= deadline:
            self.close()
            record(max(self.store.by_step()), {"error": f"{self.url}: not within checkpoint.mirror_wait_s"})

    def close(self) -> None:
        """Stop the pass before its next file. The files copied so far are no complete copy."""
        self._closed.set()
        self._pass = self._due = None

    def _try_to_copy(self) -> dict[str, Any]:
        """Make a pass in the thread and return a record of its outcome. After a failure, the next save tries again."""
        started = time.monotonic()
        try:
            copied = self._copy_new()
        except Exception as error:  # those of the libraries are of many kinds
            return {"error": self._line(error)}
        return {"path": self.url, "bytes": copied, "seconds": time.monotonic() - started}

    def _claim(self) -> None:
        """Claim the mirror for this start. An older start that still runs notices that in `_copy_new`."""
        self._put(self._writer, f"{self._place[1]}.writer")
        self._is_claimed = True

    def _copy_new(self) -> int:
        """Copy the checkpoints that the store keeps, newest first, remove other copies, and return the copied bytes."""
        local, retention, copied = self.store.by_step(), self.store.retention, 0
        copies = self._copies(newest=max(local))
        if not self._is_claimed:
            self._claim()
        if self._system.cat_file(f"{self._place[1]}.writer") != self._writer:
            raise StorageError("another training has started with this mirror; expected another place, or run.dir")
        for step in self._steps() - {*copies}:  # interrupted
            self._system.rm(self._folder(step), recursive=True)
        losses: dict[int, float | None] = {}
        if retention.best:
            manifests = {step: json.loads(self._system.cat_file(self._manifest(step))) for step in copies}
            losses = {step: manifest["info"].get("validation_loss") for step, manifest in manifests.items()}
            losses |= {step: self.store.validation_loss(path) for step, path in local.items()}
        keep = retention.steps_to_keep(max(local), {*local, *copies} - {max(local)}, losses)
        for step in sorted(keep & {*local}, reverse=True):
            try:
                if step in copies:
                    if self._system.cat_file(self._manifest(step)) == (local[step] / MANIFEST).read_bytes():
                        continue
                    self._system.rm_file(self._manifest(step))  # the run has trained and saved this step again
                copied += self._copy(step, local[step])
            except FileNotFoundError:
                if local[step].exists():
                    raise
                # Otherwise a newer checkpoint has replaced it in the meantime, and has requested another pass.
        for step in {*copies} - keep:
            self._system.rm_file(self._manifest(step))
            self._system.rm(self._folder(step), recursive=True)
        return copied

    def _copy(self, step: int, checkpoint: Path) -> int:
        """Copy a checkpoint and its run's files, the manifest last, and return the number of bytes."""
        copied = 0
        for name in self.files:
            for path in (self.run_dir / name, *(self.run_dir / name).rglob("*")):
                if path.is_file():
                    # Take a snapshot, since the run appends to its files.
                    copied += self._put(path.read_bytes(), f"{self._folder(step)}/{path.relative_to(self.run_dir)}")
        files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
        for path in (*files, checkpoint / MANIFEST):
            inside = path.relative_to(checkpoint).as_posix()
            copied += self._put(path, f"{self._folder(step)}/{CHECKPOINTS}/{checkpoint_name(step)}/{inside}")
        return copied

    def _put(self, content: bytes | Path, target: str) -> int:
        if self._closed.is_set():
            raise StorageError("the run has ended")
        is_local = "file" in self._system.protocol
        if is_local:
            make_folder(Path(target).parent)
        if isinstance(content, Path):
            self._system.put_file(str(content), target)
        else:
            self._system.pipe_file(target, content)
        if is_local:
            Path(target).chmod(0o600)
            fsync(Path(target))
            fsync(Path(target).parent)
        return content.stat().st_size if isinstance(content, Path) else len(content)

    # --- what is there -------------------------------------------------------------------------------------

    def _copies(self, newest: int | None, may_adopt: bool = False) -> list[int]:
        """Check that the copies are of this run, and return the steps of the complete ones, newest first."""
        copies = sorted((step for step in self._steps() if self._system.exists(self._manifest(step))), reverse=True)
        metrics = self.run_dir / METRICS
        with metrics.open("rb") if metrics.exists() else io.BytesIO() as file:
            record = file.readline()
        if copies and (record or not may_adopt):
            start = self._system.cat_file(f"{self._folder(copies[0])}/{METRICS}", start=0, end=max(len(record), 1))
            if start != record:
                raise ConfigError(
                    f"{self.url} has the copies of another run: choose another place or another name for run.dir"
                )
        if copies and newest is not None and copies[0] > newest:
            raise ConfigError(
                f"{self.url} has step {copies[0]}, expected none after {max(newest, 0)}: start with resume: auto, "
                "remove it or name another place"
            )
        return copies

    def _steps(self) -> set[int]:
        """Return the steps of all copies, complete or not."""
        root = self._place[1]
        names = self._system.ls(root, detail=False) if self._system.exists(root) else []
        return {found[0] for name in names if (found := step_and_revision(name.rstrip("/").rpartition("/")[2]))}

    def _folder(self, step: int) -> str:
        return f"{self._place[1]}/{checkpoint_name(step)}"

    def _manifest(self, step: int) -> str:
        return f"{self._folder(step)}/{CHECKPOINTS}/{checkpoint_name(step)}/{MANIFEST}"

    def _line(self, error: Exception) -> str:
        text = hide_passwords(" ".join(str(error).split()) or type(error).__name__)
        if isinstance(error, ImportError):
            text += f"; expected what this installs: {install_command('mirror')}"
        return truncate(text if self.url in text else f"{self.url}: {text}", _MAX_ERROR_CHARACTERS)
