"""A folder of checkpoints in which the last good one is never lost.

Order of a save: a temporary folder; its files, by any number of processes, each synced; then, by one process, the
manifest, its fsync, the rename to `step-00000100`, the fsync of the parent, and only then the removal of what
`Retention` lets go. At every instant, a power failure included, each `step-*` folder is whole. "Newest" is derived by
looking, never stored.
"""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.checkpoint.manifest import Checkpoint, check_name, recorded, verify, write_manifest
from mmldlm.checkpoint.retention import Retention
from mmldlm.errors import DataError, StorageError
from mmldlm.utils.files import FileInfo, file_info, fsync, make_folder, wait_until_visible

Writer = Callable[[Path], None] | bytes

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SIGHT_PATIENCE_S = 10.0  # network file systems show another machine's files late

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run in `folder`.

    Whoever holds the run's `RunLock` writes, and is the only one to: temporaries that it finds are of the dead.
    Others may read at the same time.
    """

    def __init__(self, folder: Path | str, retention: Retention):
        self.folder = Path(folder)
        self.retention = retention

    # --- writing ------------------------------------------------------------------------------------------

    def save(
        self, step: int, files: Mapping[str, Writer], info: Mapping[str, Any], needed_bytes: int | None = None
    ) -> Path:
        """`begin`, `write_files` and `commit` by one process; the new checkpoint's folder."""
        in_memory = sum(len(writer) for writer in files.values() if isinstance(writer, bytes))
        temporary = self.begin(step, max(needed_bytes or 0, in_memory))
        try:
            return self.commit(temporary, step, write_files(temporary, files), info)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def begin(self, step: int, needed_bytes: int) -> Path:
        """A new temporary folder, readable by the owner only, for the files of a checkpoint.

        Raises:
            StorageError: the disk has no room for `needed_bytes`, or cannot be written.
        """
        try:
            make_folder(self.folder)
            self._remove_leftovers()
            free = shutil.disk_usage(self.folder).free
            if needed_bytes > free:
                raise StorageError(
                    f"the disk of {self.folder} is too full for a checkpoint: {needed_bytes / 2**20:.1f} MiB needed, "
                    f"{free / 2**20:.1f} MiB free; nothing was written or removed"
                )
            return Path(tempfile.mkdtemp(prefix=f".tmp-step-{step:08}-", dir=self.folder))
        except OSError as error:
            raise self._refusal(step, error) from error

    def commit(self, temporary: Path, step: int, files: Mapping[str, FileInfo], info: Mapping[str, Any]) -> Path:
        """Make the checkpoint of the `files` that `write_files` left in `temporary`, then let old ones go.

        A step that exists already becomes `step-00000100.1`, and only then the old one is removed.

        Raises:
            StorageError: a file is not there as recorded, or writing failed; what was there before still is.
        """
        try:
            for name, record in files.items():
                path = temporary / name
                if not wait_until_visible(path, _SIGHT_PATIENCE_S) or path.stat().st_size != record.bytes:
                    raise StorageError(f"cannot save step {step}: {path} is not there with its {record.bytes} bytes")
            fsync(write_manifest(temporary, step, files, info))
            fsync(temporary)
            final = self._free_name(step)
            temporary.rename(final)
            fsync(self.folder)
            self._prune(final)
        except OSError as error:
            raise self._refusal(step, error) from error
        return final

    def _refusal(self, step: int, error: OSError) -> StorageError:
        return StorageError(f"cannot save step {step} in {self.folder}: {error.strerror or error}")

    def _free_name(self, step: int) -> Path:
        used = [_order(path)[1] for path in self.paths() if _order(path)[0] == step]
        return self.folder / (f"step-{step:08}" + (f".{max(used) + 1}" if used else ""))

    def _prune(self, saved: Path) -> None:
        """Keep `saved`, just hashed, and of the others the newest of each step that is to be kept."""
        step = _order(saved)[0]
        newest = {step: saved}
        for path in self.paths():
            newest.setdefault(_order(path)[0], path)
        losses = {each: self._validation_loss(path) for each, path in newest.items()} if self.retention.best else {}
        keep = {newest[each] for each in self.retention.kept(step, newest.keys() - {step}, losses)}
        going = []
        for path in self.paths():
            if path not in keep:
                # Out of sight in one instant: a reader never finds half a checkpoint.
                going.append(path.with_name(f".old-{path.name}"))
                shutil.rmtree(going[-1], ignore_errors=True)
                path.rename(going[-1])
        if going:
            fsync(self.folder)  # or a power failure might bring a half-removed one back
        for path in going:
            shutil.rmtree(path)

    def _validation_loss(self, path: Path) -> float | None:
        loss = recorded(path).get("info", {}).get("validation_loss")
        return loss if isinstance(loss, float) else None

    def _remove_leftovers(self) -> None:
        for path in self._entries():
            if path.name.startswith((".old-", ".tmp-")):
                shutil.rmtree(path, ignore_errors=True)

    # --- reading ------------------------------------------------------------------------------------------

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

    def _set_aside(self, path: Path, why: str) -> Path:
        target, count = path.with_name(f"{why}-{path.name}"), 1
        while target.exists():
            target, count = path.with_name(f"{why}-{path.name}-{count}"), count + 1
        path.rename(target)
        return target


def write_files(folder: Path, files: Mapping[str, Writer]) -> dict[str, FileInfo]:
    """Write `files` durably into the temporary `folder`, readable by the owner only; what they are, for `commit`.

    A file is given by its relative name, and by its bytes or a function that writes the path it is given.

    Raises:
        StorageError: writing failed.
    """
    for name in files:
        check_name(name)
    records = {}
    try:
        for name, writer in files.items():
            path = folder / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if isinstance(writer, bytes):
                path.write_bytes(writer)
            else:
                writer(path)
            assert path.is_file() and not path.is_symlink(), f"the writer of {name} made no file"
            path.chmod(0o600)
            fsync(path)
            records[name] = file_info(path)
        parents = {parent for name in files for parent in PurePosixPath(name).parents}
        for parent in sorted(parents, key=str, reverse=True):  # the names in a folder before the folder's own
            fsync(folder / parent)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}") from error
    return records


def _order(path: Path) -> tuple[int, int]:
    """(step, revision) of a checkpoint folder's name."""
    match = _NAME.fullmatch(path.name)
    assert match, f"not a checkpoint's name: {path}"
    return int(match[1]), int(match[2] or 0)
