"""Copies of a run's checkpoints on another disk or in an object store, by fsspec.

Each `step-00000100/` of a mirror is a run folder with one checkpoint. Its `complete.json` is written last and removed
first: a folder without it is a copy that was interrupted. Nothing is renamed, since object stores cannot.

This module runs as a process of its own for each request, see `main`; it imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mmldlm.checkpoint.names import MANIFEST, checkpoint_name, step_and_revision
from mmldlm.checkpoint.retention import Retention
from mmldlm.errors import ConfigError, DataError, MmldlmError, StorageError
from mmldlm.utils.files import FileInfo, file_info, fsync, make_folder
from mmldlm.utils.process import STOP_SIGNALS
from mmldlm.utils.short_repr import truncate

CHECKPOINTS, METRICS, MARKER = "checkpoints", "metrics.jsonl", "complete.json"
_PART_BYTES = 64 * 2**20  # of an upload to S3
_MAX_ERROR_CHARACTERS = 300


class Mirror:
    """Copies of the checkpoints of one run, which its first record distinguishes from all others.

    `files` are what a copy has of the run folder besides the checkpoint, the metrics among it.
    """

    def __init__(self, url: str, run_dir: Path, files: Sequence[str]):
        import fsspec

        self.url, self.run_dir, self.files = url, run_dir, files
        # Another process may have written since a listing was cached.
        self._system, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._is_local = "file" in self._system.protocol
        # With parts of a known size the MD5 of a large object can be computed.
        is_s3 = "s3" in self._system.protocol
        self._options = {"chunksize": _PART_BYTES, "max_concurrency": 4} if is_s3 else {}
        path = run_dir / METRICS
        self._run = hashlib.sha256(path.open("rb").readline()).hexdigest() if path.exists() else None

    def update(self, retention: Retention) -> dict[str, Any]:
        """Copy the checkpoints that `retention` keeps, the newest first, and remove the copies that it does not.

        Return the newest step, and the bytes that were copied.

        Raises:
            ConfigError: The copies are of another run or newer than this one.
            StorageError: A copy differs from its checkpoint.
        """
        paths = sorted((self.run_dir / CHECKPOINTS).glob("step-*"))
        local = {found[0]: path for path in paths if (found := step_and_revision(path.name))}
        try:
            return self._update(local, retention)
        except FileNotFoundError:
            if all(path.exists() for path in local.values()):
                raise
            return self.update(retention)  # the run has removed one meanwhile

    def _update(self, local: dict[int, Path], retention: Retention) -> dict[str, Any]:
        manifests = {step: json.loads((path / MANIFEST).read_bytes()) for step, path in local.items()}
        copies, newest, copied = self._markers(newest=max(local)), max(local), 0
        for folder in self._folders():
            if folder.rpartition("/")[2] not in map(checkpoint_name, copies):
                self._system.rm(folder, recursive=True)
        losses = {step: marker["validation_loss"] for step, marker in copies.items()}
        losses |= {step: manifest["info"].get("validation_loss") for step, manifest in manifests.items()}
        keep = retention.steps_to_keep(newest, (local.keys() | copies.keys()) - {newest}, losses)
        for step in sorted(keep & local.keys() - copies.keys(), reverse=True):
            copied += self._copy(step, local[step], manifests[step]["files"], losses[step])
        for step in copies.keys() - keep:
            self._system.rm_file(self._marker(step))
            self._system.rm(f"{self._root}/{checkpoint_name(step)}", recursive=True)
        return {"step": newest, "bytes": copied}

    def fetch(self, step: int, is_chosen: bool, folder: Path) -> dict[str, Any]:
        """Fetch the newest intact copy after `step` into the empty `folder`, which becomes a run folder.

        Args:
            step: Where the run starts without it; -1 for an empty disk.
            is_chosen: Whether the user wants this start, so that a newer copy is an error.

        Returns:
            The step of the copy, `step` if there is none, and the problems of damaged ones.

        Raises:
            ConfigError: The copies are of another run, or newer than a start that is chosen.
            DataError: All copies are damaged, and the disk is empty.
        """
        problems: dict[int, str] = {}
        for found, marker in self._markers(newest=step if is_chosen else None, may_adopt=step < 0).items():
            if found <= step:
                break
            try:
                for name, expected in marker["files"].items():
                    self._get(found, name, folder, expected)
                step = found
                break
            except DataError as error:
                problems[found] = str(error)
                shutil.rmtree(folder, ignore_errors=True)
        if problems and step < 0:
            raise DataError(f"no good copy in {self.url}: {next(iter(problems.values()))}")
        for damaged in problems:
            self._system.rm_file(self._marker(damaged))  # so that it is copied again
        return {"step": step, "problems": [*problems.values()]}

    def _markers(self, newest: int | None, may_adopt: bool = False) -> dict[int, Any]:
        """Return the content of each copy's `complete.json`, by step from the newest, after checking whose they are."""
        markers = {}
        for folder in self._folders():
            if self._system.exists(f"{folder}/{MARKER}"):
                marker = json.loads(self._system.cat_file(f"{folder}/{MARKER}"))
                markers[int(marker["step"])] = marker
        if any(marker["run"] != self._run for marker in markers.values()) and not (may_adopt and self._run is None):
            raise ConfigError(f"{self.url} has another run; expected another place, or a run.dir of another name")
        if newest is not None and max(markers, default=newest) > newest:
            raise ConfigError(
                f"{self.url} has step {max(markers)}, expected none after {max(newest, 0)}: start with resume: auto, "
                "remove it or name another place"
            )
        return dict(sorted(markers.items(), reverse=True))

    def _marker(self, step: int) -> str:
        return f"{self._root}/{checkpoint_name(step)}/{MARKER}"

    def _folders(self) -> list[str]:
        names = self._system.ls(self._root, detail=False) if self._system.exists(self._root) else []
        return [name.rstrip("/") for name in names if step_and_revision(name.rstrip("/").rpartition("/")[2])]

    def _copy(self, step: int, checkpoint: Path, files: dict[str, Any], loss: float | None) -> int:
        """Copy a checkpoint with the files of its run, then the marker; return the bytes."""
        inside = f"{CHECKPOINTS}/{checkpoint_name(step)}"
        sources = {f"{inside}/{name}": checkpoint / name for name in (*files, MANIFEST)}
        with tempfile.TemporaryDirectory() as temporary:
            for path in (
                path for name in self.files for path in (self.run_dir / name, *(self.run_dir / name).rglob("*"))
            ):
                if path.is_file():
                    # A snapshot, since the run appends to its files.
                    name = path.relative_to(self.run_dir).as_posix()
                    sources[name] = Path(temporary, name)
                    sources[name].parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, sources[name])
            infos = {name: self._put(path, f"{checkpoint_name(step)}/{name}") for name, path in sources.items()}
            for name, entry in files.items():
                if infos[f"{inside}/{name}"].sha256 != entry["sha256"]:
                    raise StorageError(f"{checkpoint / name} is damaged: it is not what its manifest says")
            facts = {name: astuple(info) for name, info in infos.items()}
            marker = Path(temporary, MARKER)
            marker.write_text(json.dumps({"step": step, "run": self._run, "validation_loss": loss, "files": facts}))
            self._put(marker, f"{checkpoint_name(step)}/{MARKER}")
        return sum(info.bytes for info in infos.values())

    def _put(self, path: Path, name: str) -> FileInfo:
        """Copy a file and verify that it has arrived: by the store's MD5, or else by reading it back.

        An ETag of S3 is the MD5 of the object, or the MD5 of its parts' MD5s, or, encrypted by a key service, neither.
        """
        target, info = f"{self._root}/{name}", file_info(path)
        if self._is_local:
            make_folder(Path(target).parent)
        self._system.put_file(str(path), target, **self._options)
        if self._is_local:
            fsync(Path(target))
            fsync(Path(target).parent)
        stored = self._system.info(target)
        md5 = str(stored.get("ETag", "")).strip('"') or base64.b64decode(stored.get("md5Hash", "")).hex()
        is_known = bool(md5) and md5 in _md5s(path)
        if stored["size"] != info.bytes or not (is_known or self._sha256(target) == info.sha256):
            raise StorageError(f"{self.url}/{name} is not what was copied: {stored['size']} of {info.bytes} bytes")
        return info

    def _sha256(self, target: str) -> str:
        digest = hashlib.sha256()
        with self._system.open(target, "rb") as file:
            for block in _blocks(file):
                digest.update(block)
        return digest.hexdigest()

    def _get(self, step: int, name: str, folder: Path, expected: list[Any]) -> None:
        """Fetch a file of a copy, which is not trusted; raise `DataError` unless it is what its marker says."""
        parts, path, source = PurePosixPath(name).parts, folder / name, f"{checkpoint_name(step)}/{name}"
        if not {*parts[:1]} & {*self.files, CHECKPOINTS} or ".." in parts:
            raise DataError(f"{self.url}/{source}: not a file of a run")
        make_folder(path.parent)
        self._system.get_file(f"{self._root}/{source}", str(path))
        fsync(path)
        if list(astuple(file_info(path))) != expected:
            raise DataError(f"{self.url}/{source} is damaged: it is not what {MARKER} says")


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_PART_BYTES):
        yield block


def _md5s(path: Path) -> set[str]:
    """Return the MD5 of a file, and the ETag that S3 gives it in parts."""
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with path.open("rb") as file:
        for block in _blocks(file):
            whole.update(block)
            parts.append(hashlib.md5(block, usedforsecurity=False).digest())
    return {whole.hexdigest(), f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"}


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, so that a killed run leaves no second writer behind."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main(argv: Sequence[str]) -> None:
    """Call a method of `Mirror`; print what it returns as JSON, or {"error": one line, "code": exit code}.

    `argv` has the parent's process id; the method; the arguments of `Mirror` and of the method, as JSON.
    """
    os.umask(0o077)
    os.nice(10)
    for number in STOP_SIGNALS:  # which may be for all processes of a job: the run ends this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=[int(argv[0])], daemon=True).start()
    (url, run_dir, files), arguments = json.loads(argv[2])
    try:
        mirror = Mirror(url, Path(run_dir), files)
        if argv[1] == "fetch":
            answer = mirror.fetch(**{**arguments, "folder": Path(arguments["folder"])})
        else:
            answer = mirror.update(Retention(**arguments))
    except Exception as error:  # those of the libraries are of many kinds
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ImportError):
            text += "; expected what pip install mmldlm[mirror] installs"
        ours = error if isinstance(error, MmldlmError) else StorageError(f"{url}: {text}")
        answer = {"error": truncate(str(ours), _MAX_ERROR_CHARACTERS), "code": int(ours.exit_code)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # without waiting for threads of the libraries


if __name__ == "__main__":
    main(sys.argv[1:])
