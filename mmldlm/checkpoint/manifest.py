"""Manifest of a checkpoint folder: the names, sizes and hashes of its files, and where each tensor is.

`manifest.json` holds `{"format", "step", "info", "files": {name: {"bytes", "sha256"}}, "tensors", "sha256"}`. The last
entry is the hash of all others, so a flipped bit in the manifest itself is detected as well. "tensors" has each group's
`TensorGroup`; in format 1 it is missing, and every tensor is whole in one of the files.
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

from mmldlm.checkpoint.names import MANIFEST
from mmldlm.checkpoint.slices import TensorGroup, groups_from_json
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, sha256
from mmldlm.utils.short_repr import short_repr, truncate

FORMAT, OLDEST_FORMAT = 2, 1
MAX_MANIFEST_BYTES = MAX_SMALL_BYTES = 16 * 2**20
_MAX_DEPTH = 40  # nesting of the JSON: code that walks through it may use recursion
_MAX_NAME_BYTES = 200
_HASH_THREADS = 8
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder: every file is as it was written."""

    path: Path
    step: int
    info: Mapping[str, Any]
    files: Mapping[str, int]  # name -> size in bytes
    tensors: Mapping[str, TensorGroup] | None = None  # by group; None in format 1

    def file(self, name: str) -> Path:
        """Return the path of the file saved as `name`; DataError if there is none."""
        if name not in self.files:
            raise DataError(f"{self.path} has no file {name!r}; it has {truncate(', '.join(sorted(self.files)), 400)}")
        return self.path / name

    def read(self, name: str) -> bytes:
        """Return the content of the file `name`; DataError if it is missing or has more than `MAX_SMALL_BYTES`."""
        path = self.file(name)
        if self.files[name] > MAX_SMALL_BYTES:
            raise DataError(f"{path} has {self.files[name]} bytes, expected at most {MAX_SMALL_BYTES}")
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error


def write_checkpoint_manifest(
    folder: Path,
    step: int,
    files: Mapping[str, FileInfo],
    info: Mapping[str, Any],
    tensors: Mapping[str, TensorGroup],
) -> Path:
    """Write the manifest of `files`, which are in `folder` already, and return its path."""
    path = folder / MANIFEST
    entries = {name: asdict(file) for name, file in files.items()}
    groups = {name: group.to_json() for name, group in tensors.items()}
    path.write_bytes(_seal({"format": FORMAT, "step": step, "info": dict(info), "files": entries, "tensors": groups}))
    path.chmod(0o600)
    return path


def verify_checkpoint(folder: Path, hashes: bool = True, links: bool = False) -> Checkpoint:
    """Read the manifest of `folder` and check location, size and hash of every file.

    Args:
        hashes: Hash every file. False checks location and size only, for ranks other than the one that hashes.
        links: Follow symbolic links, of which the cache of a model hub consists.

    Raises:
        DataError: A file is missing, damaged, misplaced or a symbolic link; the message names it.
    """
    body = _read(folder / MANIFEST, links)
    files: dict[str, int] = {}
    for name, entry in body["files"].items():
        check_name(name)
        size = _regular_size(folder, name, links)
        if size != entry["bytes"]:
            raise DataError(f"{folder / name} has {size} bytes, its manifest says {entry['bytes']}")
        files[name] = size
    if hashes:
        with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
            for name, digest in zip(files, pool.map(_hash, [folder / name for name in files]), strict=True):
                if digest != (expected := body["files"][name]["sha256"]):
                    raise DataError(f"{folder / name} has SHA-256 {digest}, its manifest says {expected}")
    tensors = None
    if body["format"] > 1:
        try:
            tensors = groups_from_json(body["tensors"], files)
        except DataError as error:
            raise DataError(f"{folder / MANIFEST}: {error}") from None
    return Checkpoint(folder, body["step"], body["info"], files, tensors)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder` without checking its files; empty if it cannot be read."""
    try:
        return _read(folder / MANIFEST)
    except DataError:
        return {}


def check_name(name: str) -> None:
    """Raise DataError unless `name` is a plain relative path that stays inside the folder."""
    path = PurePosixPath(name)
    # `PurePosixPath` normalizes `./x`, `a//b` and `a/`, so they differ from their text.
    is_inside = name == str(path) and not path.is_absolute() and ".." not in path.parts and path.parts
    is_readable = name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES
    if not is_inside or not is_readable or "\\" in name or name == MANIFEST:
        raise DataError(f"not a file name inside a checkpoint: {short_repr(name)}")


def _hash(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _regular_size(folder: Path, name: str, links: bool) -> int:
    """Return the size of the regular file `name`; unless `links`, no link may be on the way to it."""
    path = folder / name
    # The path and its parents below `folder`, which itself may be a link.
    components = [path, *path.parents][: len(PurePosixPath(name).parts)]
    if not links and any(component.is_symlink() for component in components):
        raise DataError(f"{path} is a symbolic link, or in one: refused")
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}, which its manifest names: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file")
    return status.st_size


def _seal(body: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a manifest, with the hash of `body`."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _read(path: Path, links: bool = False) -> dict[str, Any]:
    """Return the content of a manifest after checking that it is byte for byte what `_seal` wrote, and its types."""
    try:
        if not path.is_file() or (path.is_symlink() and not links):
            raise DataError(f"{path} is missing")
        with path.open("rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_MANIFEST_BYTES:
        raise DataError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        body = json.loads(raw)
        # Comparing bytes also excludes duplicate keys, of which `json.loads` keeps only the last.
        if not isinstance(body, dict) or _seal({k: v for k, v in body.items() if k != "sha256"}) != raw:
            raise DataError(f"{path} is damaged: it does not match its own hash")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not the JSON of a manifest") from error
    if b"\n" + b" " * _MAX_DEPTH in raw:  # indented by one space per level
        raise DataError(f"{path} is nested more than {_MAX_DEPTH} levels deep")
    found = body.get("format")
    if type(found) is not int or not OLDEST_FORMAT <= found <= FORMAT:  # not isinstance, for which True is an int
        raise DataError(f"{path} has format {short_repr(found)}, this version reads {OLDEST_FORMAT} to {FORMAT}")
    if not _well_typed(body):
        raise DataError(f"{path} lacks step, info, files or tensors, or has them of a wrong type")
    return body


def _well_typed(body: dict[str, Any]) -> bool:
    step, info, files = body.get("step"), body.get("info"), body.get("files")
    return (
        _is_count(step)
        and isinstance(info, dict)
        and isinstance(files, dict)
        and (body["format"] == 1 or isinstance(body.get("tensors"), dict))
        and all(
            isinstance(entry, dict)
            and _is_count(entry.get("bytes"))
            and isinstance(entry.get("sha256"), str)
            and _SHA256.fullmatch(entry["sha256"])
            for entry in files.values()
        )
    )


def _is_count(value: Any) -> bool:
    # Not isinstance, for which True is an int.
    return type(value) is int and 0 <= value < 2**63
