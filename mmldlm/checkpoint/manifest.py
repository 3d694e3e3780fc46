"""The manifest of a checkpoint folder: what belongs to it, and the proof that it is all there.

`manifest.json` holds `{"format", "step", "info", "files": {name: {"bytes", "sha256"}}, "sha256"}`;
the last entry is the hash of the rest, so a flipped bit in the manifest itself is seen too.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.errors import DataError
from mmldlm.files import sha256

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 2**20
_CHUNK = 4 * 2**20


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
            raise DataError(f"{self.path} has no file {name!r}; it has {', '.join(sorted(self.files))}")
        return self.path / name


def write_manifest(folder: Path, step: int, names: list[str], info: Mapping[str, Any]) -> Path:
    """Hash the files `names` of `folder` as they are now and write the manifest."""
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)} for name in names}
    path = folder / MANIFEST
    path.write_bytes(_seal({"format": FORMAT, "step": step, "info": dict(info), "files": files}))
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
    for name, entry in body["files"].items() if hashes else ():
        if (found := _hash(folder / name)) != entry["sha256"]:
            raise DataError(f"{folder / name} has SHA-256 {found}, its manifest says {entry['sha256']}")
    return Checkpoint(folder, body["step"], body["info"], files)


def recorded_bytes(folder: Path) -> int:
    """Size of a checkpoint by its manifest alone; 0 if that cannot be read."""
    try:
        return sum(entry["bytes"] for entry in _read(folder / MANIFEST)["files"].values())
    except DataError:
        return 0


def check_name(name: str) -> None:
    """A file name must be a plain relative path that stays inside the folder; else DataError."""
    path = PurePosixPath(name)
    plain = name == str(path) and not path.is_absolute() and ".." not in path.parts and path.parts
    if not plain or "\\" in name or "\0" in name or name == MANIFEST:
        raise DataError(f"not a file name inside a checkpoint: {name!r}")


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
    if body.get("format") != FORMAT:
        raise DataError(f"{path} has format {body.get('format')!r}, this version reads {FORMAT}")
    if not _well_typed(body):
        raise DataError(f"{path} lacks step, info or files, or has them of a wrong type")
    return body


def _well_typed(body: dict[str, Any]) -> bool:
    step, info, files = body.get("step"), body.get("info"), body.get("files")
    return (
        type(step) is int
        and step >= 0
        and isinstance(info, dict)
        and isinstance(files, dict)
        and all(
            isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
            for entry in files.values()
        )
    )
