"""Manifest of a checkpoint folder: the names, sizes and hashes of its files, and the place of each tensor.

`manifest.json` holds `{"format", "step", "info", "files": {name: {"bytes", "sha256"}}, "tensors", "sha256"}`. The last
entry is the hash of all others, so a flipped bit in the manifest itself is detected, too. "tensors" has the
`TensorGroup` of each group. A manifest with the right hash is trusted, except for its file names: they are checked not
to lead outside the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.checkpoint.names import MANIFEST, step_and_revision
from mmldlm.checkpoint.slices import TensorGroup
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, check_inside, read_regular, sha256
from mmldlm.utils.short_repr import short_repr, truncate

FORMAT = 2
_ENTRIES = {"format": int, "step": int, "info": dict, "files": dict, "tensors": dict}
_MAX_NAME_BYTES = 200
_HASH_THREADS = 8
_OF_TOOLS = (".git", ".gitattributes", ".gitignore", ".cache")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder. Every file is as it was written."""

    path: Path
    step: int
    info: Mapping[str, Any]
    files: Mapping[str, int]  # name -> size in bytes
    tensors: Mapping[str, TensorGroup]  # by group

    def file(self, name: str) -> Path:
        """Return the path of the file `name`. Raises DataError if there is none."""
        if name not in self.files:
            raise DataError(f"{self.path} has no file {name!r}; it has {truncate(', '.join(sorted(self.files)), 400)}")
        return self.path / name


def write_checkpoint_manifest(
    folder: Path,
    step: int,
    files: Mapping[str, FileInfo],
    info: Mapping[str, Any],
    tensors: Mapping[str, TensorGroup],
) -> Path:
    """Write the manifest of `files`, which must already be in `folder`, and return its path."""
    path = folder / MANIFEST
    entries = {name: asdict(file) for name, file in files.items()}
    groups = {name: asdict(group) for name, group in tensors.items()}
    path.write_bytes(_seal({"format": FORMAT, "step": step, "info": dict(info), "files": entries, "tensors": groups}))
    return path


def verify_checkpoint(folder: Path, hashes: bool = True) -> Checkpoint:
    """Read the manifest of `folder` and check the size and hash of every file.

    Without `hashes`, only sizes are checked. That is enough if another rank hashes.

    Raises:
        DataError: A file is damaged. The message names it.
    """
    try:
        body = _read(folder / MANIFEST)
        with foreign(folder / MANIFEST):
            files = {name: int(entry["bytes"]) for name, entry in body["files"].items()}
            digests = {name: str(entry["sha256"]) for name, entry in body["files"].items()}
            tensors = {name: TensorGroup.from_json(group) for name, group in body["tensors"].items()}
        if (named := step_and_revision(folder.name)) and named[0] != body["step"]:
            raise DataError(f"{folder}: expected the step of its name, found step {body['step']}")
        for name, expected_bytes in files.items():
            check_name(name)
            if (size := (folder / name).stat().st_size) != expected_bytes:
                raise DataError(f"{folder / name} has {size} bytes, its manifest says {expected_bytes}")
        if hashes:
            for path in folder.rglob("*"):  # also files that the manifest does not name
                check_inside(path, folder)
            with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
                for name, digest in zip(files, pool.map(sha256, [folder / name for name in files]), strict=True):
                    if digest != (expected := digests[name]):
                        raise DataError(f"{folder / name} has SHA-256 {digest}, its manifest says {expected}")
    except OSError as error:
        raise DataError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    return Checkpoint(folder, body["step"], body["info"], files, tensors)


@contextmanager
def foreign(path: Path) -> Iterator[None]:
    """Turn errors of the body, which reads files of a stranger, into a `DataError`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = truncate(" ".join(f"{type(error).__name__} {error}".split()))
        raise DataError(f"{path}: this version writes other contents ({reason})") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder` without checking its files, or an empty one if it cannot be read."""
    try:
        return _read(folder / MANIFEST)
    except (DataError, OSError):
        return {}


def foreign_files(path: Path) -> Iterator[str]:
    """Yield a line for each file in the folder of a checkpoint or bundle that is not in its manifest.

    Files of git and of download tools do not count.
    """
    known = {MANIFEST, *read_manifest(path).get("files", ())}
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir())
    for name in names:
        if name not in known and name.partition("/")[0] not in _OF_TOOLS:
            yield f"{path}: has a file that is not in its manifest, {name}"


def check_name(name: str) -> None:
    """Raise DataError unless `name` is a plain relative path that stays inside the folder."""
    path = PurePosixPath(name)
    # `PurePosixPath` normalizes `./x`, `a//b` and `a/`, so the comparison refuses them.
    is_inside = name == str(path) and not path.is_absolute() and ".." not in path.parts and path.parts
    is_readable = name.isprintable() and len(name.encode()) <= _MAX_NAME_BYTES
    if not is_inside or not is_readable or "\\" in name or name == MANIFEST:
        raise DataError(f"not a file name inside a checkpoint: {short_repr(name)}")


def _seal(body: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a manifest, with the hash of `body`."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a manifest. Raises DataError unless `_seal` wrote exactly these bytes in this format."""
    if not path.is_file():
        raise DataError(f"{path} is missing")
    raw = read_regular(path, path.parent)
    try:
        body = json.loads(raw)
        is_intact = isinstance(body, dict) and _seal({k: v for k, v in body.items() if k != "sha256"}) == raw
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not the JSON of a manifest") from error
    if not is_intact:
        raise DataError(f"{path} is damaged: it does not match its own hash")
    if not all(isinstance(body.get(key), kind) for key, kind in _ENTRIES.items()):
        raise DataError(f"{path}: expected {', '.join(_ENTRIES)}, found {short_repr(body)}")
    if body["format"] != FORMAT:
        raise DataError(f"{path} has format {body['format']}, this version reads {FORMAT}: train the run again")
    return body
