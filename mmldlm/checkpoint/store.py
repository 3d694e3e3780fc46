"""A folder of checkpoints in which the last good one is never lost.

Order of a save: temporary folder, files, fsync of each, manifest, fsync, rename to `step-00000100`,
fsync of the parent, and only then the removal of older ones. At every instant, a power failure
included, each `step-*` folder is whole. "Newest" is derived by looking, never stored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.manifest import Checkpoint, check_name, recorded_bytes, verify, write_manifest
from mmldlm.errors import DataError, StorageError
from mmldlm.files import fsync

Writer = Callable[[Path], None] | bytes

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_FOREIGN_TEMPORARY_S = 24 * 3600  # another host's processes cannot be asked whether they live

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run in `folder`, of which `keep_last` are kept.

    One process writes (the holder of the `RunLock`); others may read at the same time.
    """

    def __init__(self, folder: Path | str, keep_last: int):
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        self.folder = Path(folder)
        self.keep_last = keep_last

    def save(
        self, step: int, files: Mapping[str, Writer], info: Mapping[str, Any], estimated_bytes: int | None = None
    ) -> Path:
        """Write a checkpoint and return its folder, then remove those beyond `keep_last`.

        `files` maps a relative name to its bytes, or to a function that writes the path it is given.
        The disk must hold `estimated_bytes`, by default the size of the checkpoint before. A step
        that exists already is written anew, as `step-00000100.1`, and then the old one removed.

        Raises:
            StorageError: the disk is too full, or writing failed; what was there before still is.
        """
        for name in files:
            check_name(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._check_space(files, estimated_bytes)
            with self._temporary(step) as temporary:
                for name, writer in files.items():
                    _write(temporary / name, writer)
                fsync(write_manifest(temporary, step, list(files), info))
                for directory in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
                    fsync(directory)
                final = self._free_name(step)
                temporary.rename(final)
            fsync(self.folder)
            self._prune(final)
        except OSError as error:
            raise StorageError(f"cannot save step {step} in {self.folder}: {error.strerror or error}") from error
        return final

    def newest(self, repair: bool = True) -> Checkpoint | None:
        """The newest checkpoint that passes verification; None in a folder that never had one.

        Damaged ones are renamed to `damaged-step-*` with a warning; with `repair` false (for a
        reader beside a run) they are only passed over.

        Raises:
            DataError: there are checkpoints, but none is good: to start anew is not ours to decide.
        """
        vanished, paths = False, self.paths()
        for path in paths:
            try:
                return verify(path)
            except DataError as error:
                if not path.exists():  # pruned while we were reading
                    vanished = True
                    continue
                log.warning("checkpoint %s is damaged, trying an older one: %s", path.name, error)
                if repair:
                    self._set_aside(path, "damaged")
        # Listing a folder is no instant: beside a writer it may show neither the pruned nor the new one.
        left = self.paths()
        if vanished or not set(left) <= set(paths):
            return self.newest(repair)
        left += [path for path in self._entries() if path.name.startswith("damaged-")]
        if left:
            names = ", ".join(sorted(path.name for path in left))
            raise DataError(f"no good checkpoint in {self.folder}, only {names}: move them away to start anew")
        return None

    def open(self, path: Path | str) -> Checkpoint:
        """The verified checkpoint at `path`, which may lie anywhere; DataError otherwise."""
        return verify(Path(path))

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints of later steps to `superseded-*`, as a resume from an older one must:
        otherwise the next `newest` would come from the abandoned branch. -1 sets all aside.
        """
        return [self._set_aside(path, "superseded") for path in self.paths() if _order(path)[0] > step]

    def paths(self) -> list[Path]:
        """All checkpoint folders, unverified, the newest first."""
        found = [path for path in self._entries() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_order, reverse=True)

    def _entries(self) -> list[Path]:
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    def _check_space(self, files: Mapping[str, Writer], estimated_bytes: int | None) -> None:
        in_memory = sum(len(writer) for writer in files.values() if isinstance(writer, bytes))
        before = self.paths()
        guess = estimated_bytes if estimated_bytes is not None else recorded_bytes(before[0]) if before else 0
        needed, free = max(guess, in_memory), shutil.disk_usage(self.folder).free
        if needed > free:
            mib = 2**20
            raise StorageError(
                f"the disk of {self.folder} is too full for a checkpoint: {needed / mib:.1f} MiB needed, "
                f"{free / mib:.1f} MiB free; nothing was written or removed"
            )

    @contextlib.contextmanager
    def _temporary(self, step: int) -> Iterator[Path]:
        """A folder, readable by the owner only, that is gone afterwards unless it was renamed."""
        prefix = f".tmp-step-{step:08}-{socket.gethostname()}-{os.getpid()}-"
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        used = [_order(path)[1] for path in self.paths() if _order(path)[0] == step]
        return self.folder / (f"step-{step:08}" + (f".{max(used) + 1}" if used else ""))

    def _prune(self, saved: Path) -> None:
        """Keep `saved`, just hashed, and the newest `keep_last - 1` of other steps."""
        older: dict[int, Path] = {}
        for path in self.paths():
            if _order(path)[0] != _order(saved)[0]:
                older.setdefault(_order(path)[0], path)
        keep = {saved, *list(older.values())[: self.keep_last - 1]}
        for path in self.paths():
            if path not in keep:
                # Out of sight in one instant: a reader never finds half a checkpoint.
                gone = path.with_name(f".old-{path.name}")
                shutil.rmtree(gone, ignore_errors=True)
                path.rename(gone)
                shutil.rmtree(gone)

    def _remove_leftovers(self) -> None:
        for path in self._entries():
            if path.name.startswith(".old-") or (path.name.startswith(".tmp-") and _is_abandoned(path)):
                shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, path: Path, why: str) -> Path:
        target, count = path.with_name(f"{why}-{path.name}"), 1
        while target.exists():
            target, count = path.with_name(f"{why}-{path.name}-{count}"), count + 1
        path.rename(target)
        return target


def _order(path: Path) -> tuple[int, int]:
    """(step, revision) of a checkpoint folder's name."""
    match = _NAME.fullmatch(path.name)
    assert match, f"not a checkpoint's name: {path}"
    return int(match[1]), int(match[2] or 0)


def _write(path: Path, writer: Writer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(writer, bytes):
        path.write_bytes(writer)
    else:
        writer(path)
    assert path.is_file() and not path.is_symlink(), f"the writer of {path.name} made no file"
    fsync(path)


def _is_abandoned(temporary: Path) -> bool:
    """Whether the writer of a temporary folder is dead. A process saves one checkpoint at a time, so
    one with our own number is of a process before us.
    """
    start, pid, _ = temporary.name.rsplit("-", 2)
    host = start.split("-", 3)[-1]
    if host != socket.gethostname() or not pid.isdigit():
        with contextlib.suppress(OSError):
            return time.time() - temporary.stat().st_mtime > _FOREIGN_TEMPORARY_S
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # alive, and another user's
    return int(pid) == os.getpid()
