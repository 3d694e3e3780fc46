"""The manifest of a checkpoint folder: what belongs to it, and the proof that it is all there.

`manifest.json` holds `{"format", "step", "info", "files": {name: {"bytes", "sha256"}}, "sha256"}`;
the last entry is the hash of the rest, so a flipped bit in the manifest itself is seen too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, sha256
from mmldlm.utils.short_repr import cut, shown

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = MAX_SMALL_BYTES = 16 * 2**20
_MAX_DEPTH = 40  # of the JSON; whoever walks through it may do so by recursion
_MAX_NAME_BYTES = 200
_HASH_THREADS = 8
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose every file was just found to be as it was written."""

    path: Path
    step: int
    info: Mapping[str, Any]
    files: Mapping[str, int]  # name -> bytes

    def file(self, name: str) -> Path:
        """The path of the file saved as `name`; DataError if the checkpoint has none."""
        if name not in self.files:
            raise DataError(f"{self.path} has no file {name!r}; it has {cut(', '.join(sorted(self.files)), 400)}")
        return self.path / name

    def read(self, name: str) -> bytes:
        """The content of a small file; DataError if the checkpoint has none of that name, or a large one."""
        path = self.file(name)
        if self.files[name] > MAX_SMALL_BYTES:
            raise DataError(f"{path} has {self.files[name]} bytes, expected at most {MAX_SMALL_BYTES}")
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error


def write_manifest(folder: Path, step: int, files: Mapping[str, FileInfo], info: Mapping[str, Any]) -> Path:
    """Write the manifest of `files`, which lie in `folder` already."""
    path = folder / MANIFEST
    entries = {name: asdict(record) for name, record in files.items()}
    path.write_bytes(_seal({"format": FORMAT, "step": step, "info": dict(info), "files": entries}))
    path.chmod(0o600)
    return path


def verify(folder: Path, hashes: bool = True) -> Checkpoint:
    """Read the manifest of `folder` and check every file's place, size and hash.

    Without `hashes` only place and size: for the ranks beside the one that has read every byte.

    Raises:
        DataError: naming the file that is missing, damaged, misplaced or a link.
    """
    body = _read(folder / MANIFEST)
    files: dict[str, int] = {}
    for name, entry in body["files"].items():
        check_name(name)
        size = _regular_size(folder, name)
        if size != entry["bytes"]:
            raise DataError(f"{folder / name} has {size} bytes, its manifest says {entry['bytes']}")
        files[name] = size
    if hashes:
        with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:  # hashing holds no lock
            for name, found in zip(files, pool.map(_hash, [folder / name for name in files]), strict=True):
                if found != (expected := body["files"][name]["sha256"]):
                    raise DataError(f"{folder / name} has SHA-256 {found}, its manifest says {expected}")
    return Checkpoint(folder, body["step"], body["info"], files)


def recorded(folder: Path) -> dict[str, Any]:
    """What the manifest of `folder` says, its files unseen; empty if it cannot be read."""
    try:
        return _read(folder / MANIFEST)
    except DataError:
        return {}


def check_name(name: str) -> None:
    """A file name must be a plain relative path that stays inside the folder; else DataError."""
    path = PurePosixPath(name)
    plain = name == str(path) and not path.is_absolute() and ".." not in path.parts and path.parts
    short = name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES
    if not plain or not short or "\\" in name or name == MANIFEST:
        raise DataError(f"not a file name inside a checkpoint: {shown(name)}")


def _hash(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _regular_size(folder: Path, name: str) -> int:
    """Bytes of the regular file `name`; neither it nor a folder on the way may be a link out of here."""
    path = folder / name
    steps = [path, *path.parents][: len(PurePosixPath(name).parts)]
    if any(step.is_symlink() for step in steps):
        raise DataError(f"{path} is a symbolic link, or in one: refused")
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}, which its manifest names: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file")
    return found.st_size


def _seal(body: Mapping[str, Any]) -> bytes:
    """The one text of a manifest's content, its own hash included."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    """A manifest's content, known to be exactly what `_seal` wrote and of the right types."""
    try:
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path} is missing")
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_MANIFEST_BYTES:
        raise DataError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        body = json.loads(raw)
        if not isinstance(body, dict) or _seal({k: v for k, v in body.items() if k != "sha256"}) != raw:
            raise DataError(f"{path} is damaged: it does not match its own hash")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not the JSON of a manifest") from error
    if b"\n" + b" " * _MAX_DEPTH in raw:  # it is indented by one space a level
        raise DataError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    if body.get("format") != FORMAT:
        raise DataError(f"{path} has format {shown(body.get('format'))}, this version reads {FORMAT}")
    if not _well_typed(body):
        raise DataError(f"{path} lacks step, info or files, or has them of a wrong type")
    return body


def _well_typed(body: dict[str, Any]) -> bool:
    step, info, files = body.get("step"), body.get("info"), body.get("files")
    return (
        _is_count(step)
        and isinstance(info, dict)
        and isinstance(files, dict)
        and all(
            isinstance(entry, dict)
            and _is_count(entry.get("bytes"))
            and isinstance(entry.get("sha256"), str)
            and _SHA256.fullmatch(entry["sha256"])
            for entry in files.values()
        )
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
