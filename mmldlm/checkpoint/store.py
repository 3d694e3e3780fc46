"""Folder of checkpoints that never loses its last valid one.

A save creates a temporary folder, and any number of processes write and fsync their files in it. Then one process
writes and fsyncs the manifest, renames the folder to `step-00000100` and fsyncs the parent folder. Only then does it
remove the checkpoints that `Retention` does not keep. So each `step-*` folder is complete at every instant, even after
a power failure. We never store which checkpoint is the newest: we list the folder to find it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.checkpoint.manifest import (
    Checkpoint,
    check_name,
    read_manifest,
    verify_checkpoint,
    write_checkpoint_manifest,
)
from mmldlm.checkpoint.names import checkpoint_name, step_and_revision
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.slices import TensorGroup
from mmldlm.errors import DataError, StorageError
from mmldlm.utils.files import FileInfo, file_info, fsync, make_folder, wait_until_visible

FileContent = Callable[[Path], None] | bytes  # a function that writes the file at the given path, or its bytes

_VISIBLE_TIMEOUT_S = 10.0  # a network file system may show another machine's files with a delay

log = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints of one run in `folder`.

    Only the holder of the run's `RunLock` writes. So if it finds a temporary folder, a killed process has left it.
    Other processes may read at the same time.
    """

    def __init__(self, folder: Path | str, retention: Retention):
        self.folder = Path(folder)
        self.retention = retention

    # --- writing ------------------------------------------------------------------------------------------

    def begin(self, step: int, needed_bytes: int) -> Path:
        """Create a temporary folder for the files of a checkpoint, readable only by the owner, and return it.

        Raises:
            StorageError: The disk has less than `needed_bytes` free, or cannot be written.
        """
        with self._saving(step):
            make_folder(self.folder)
            for path in self._entries():  # leftovers that take space on the disk
                if path.name.startswith((".old-", ".tmp-")):
                    shutil.rmtree(path, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free
            if needed_bytes > free:
                raise StorageError(
                    f"the disk of {self.folder} is too full for a checkpoint: {needed_bytes / 2**20:.1f} MiB needed, "
                    f"{free / 2**20:.1f} MiB free; nothing was written or removed"
                )
            return Path(tempfile.mkdtemp(prefix=f".tmp-{checkpoint_name(step)}-", dir=self.folder))

    def commit(
        self,
        temporary: Path,
        step: int,
        files: Mapping[str, FileInfo],
        info: Mapping[str, Any],
        tensors: Mapping[str, TensorGroup],
    ) -> Path:
        """Publish the checkpoint in `temporary` and return its folder. Remove checkpoints that the policy drops.

        If the step exists already, the new folder is `step-00000100.1`, and the old one is removed afterwards. `files`
        has the results of `write_files` from all processes.

        Raises:
            StorageError: A file is missing or has another size, or writing fails. Existing checkpoints are unchanged.
        """
        with self._saving(step):
            for name, file in files.items():
                path = temporary / name
                if not wait_until_visible(path, _VISIBLE_TIMEOUT_S) or path.stat().st_size != file.bytes:
                    raise StorageError(
                        f"cannot save step {step}: {path} is missing or does not have {file.bytes} bytes"
                    )
            manifest = write_checkpoint_manifest(temporary, step, files, info, tensors)
            manifest.chmod(0o600)
            fsync(manifest)
            fsync(temporary)
        return self.publish(temporary, step)

    def publish(self, temporary: Path, step: int) -> Path:
        """Publish a complete checkpoint in `temporary`, which has its manifest already. Otherwise like `commit`."""
        with self._saving(step):
            make_folder(self.folder)
            revisions = [revision for number, revision in self._numbered() if number == step]
            final = self.folder / checkpoint_name(step, max(revisions, default=-1) + 1)
            temporary.rename(final)
            fsync(self.folder)
            self._prune(step)
        return final

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot save step {step} in {self.folder}: {error.strerror or error}") from error

    def _prune(self, saved: int) -> None:
        """Remove all checkpoints except the newest revision of step `saved` and of each other step to keep."""
        newest, removed = self.by_step(), []
        losses = {step: self.validation_loss(path) for step, path in newest.items()} if self.retention.best else {}
        kept = {newest[step] for step in self.retention.steps_to_keep(saved, newest.keys() - {saved}, losses)}
        for path in self.paths():
            if path not in kept:
                # Renaming hides the folder atomically, so that no reader finds a half-removed checkpoint.
                removed.append(path.with_name(f".old-{path.name}"))
                # Remove the leftover of an earlier attempt, since the rename onto it would fail.
                shutil.rmtree(removed[-1], ignore_errors=True)
                path.rename(removed[-1])
        if removed:
            fsync(self.folder)  # otherwise a power failure could bring a half-removed checkpoint back
        for path in removed:
            shutil.rmtree(path)

    # --- reading ------------------------------------------------------------------------------------------

    def newest(self, repair: bool = True) -> Checkpoint | None:
        """Return the newest checkpoint that passes verification, or None if the folder never had a checkpoint.

        Damaged ones are renamed to `damaged-step-*`. Readers of a running run pass `repair=False`, which only skips
        them.

        Raises:
            DataError: All checkpoints are damaged. Only the user may decide to start over.
        """
        vanished, paths = False, self.paths()
        for path in paths:
            try:
                return verify_checkpoint(path)
            except DataError as error:
                if not path.exists():  # the run removed it while we read it
                    vanished = True
                    continue
                log.warning("checkpoint %s is damaged, trying an older one: %s", path.name, error)
                if repair:
                    self._set_aside(path, "damaged")
        # Listing a folder is not atomic. While a run writes, we may see neither the removed nor the new checkpoint.
        damaged = self.paths()
        if vanished or not set(damaged) <= set(paths):
            return self.newest(repair)
        damaged += [path for path in self._entries() if path.name.startswith("damaged-")]
        if damaged:
            names = ", ".join(sorted(path.name for path in damaged))
            raise DataError(f"no good checkpoint in {self.folder}, only {names}: move them away to start over")
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints after `step` to `superseded-*`. -1 renames all of them.

        A resume from an older checkpoint needs this, since `newest` would return a checkpoint of the abandoned branch.
        """
        for (saved, _), path in reversed(self._numbered().items()):
            if saved > step:
                self._set_aside(path, "superseded")

    def paths(self) -> list[Path]:
        """Return all checkpoint folders, newest first. They are not verified."""
        return [*reversed(self._numbered().values())]

    def by_step(self) -> dict[int, Path]:
        """Return the newest revision of each step's checkpoint. They are not verified."""
        return {step: path for (step, _), path in self._numbered().items()}

    def _numbered(self) -> dict[tuple[int, int], Path]:
        """Return all checkpoint folders by (step, revision), in ascending order."""
        paths = {number: path for path in self._entries() if (number := step_and_revision(path.name)) and path.is_dir()}
        return dict(sorted(paths.items()))

    @staticmethod
    def validation_loss(path: Path) -> float | None:
        """Return the validation loss in a checkpoint's manifest."""
        return read_manifest(path).get("info", {}).get("validation_loss")

    def _entries(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    def _set_aside(self, path: Path, reason: str) -> None:
        target, count = path.with_name(f"{reason}-{path.name}"), 1
        while target.exists():
            target, count = path.with_name(f"{reason}-{path.name}-{count}"), count + 1
        path.rename(target)


def write_files(folder: Path, files: Mapping[str, FileContent]) -> dict[str, FileInfo]:
    """Write and fsync files in the folder from `CheckpointStore.begin`, readable only by the owner.

    Return the size and hash of each file, for `CheckpointStore.commit`.

    Raises:
        DataError: A name is not a plain relative path.
    """
    for name in files:
        check_name(name)
    written = {}
    try:
        for name, content in files.items():
            path = folder / name
            # Do not recreate `folder`: it is gone if the run was moved.
            for parent in reversed(PurePosixPath(name).parents[:-1]):
                (folder / parent).mkdir(mode=0o700, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                content(path)
            assert path.is_file() and not path.is_symlink(), f"the writer of {name} created no regular file"
            path.chmod(0o600)
            fsync(path)
            written[name] = file_info(path)
        parents = {parent for name in files for parent in PurePosixPath(name).parents}
        for parent in sorted(parents, key=str, reverse=True):  # subfolders before the folders that contain them
            fsync(folder / parent)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    return written
