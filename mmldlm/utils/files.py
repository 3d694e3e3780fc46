"""Durable writes, hashes and visibility of files, shared by data store, checkpoints and run folder."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileInfo:
    """Size and SHA-256 of a file, as stored in manifests."""

    bytes: int
    sha256: str


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and fsync their entries."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def folder_around(path: Path, *markers: str) -> Path | None:
    """Return the nearest folder above `path` with a file of one of these names, None if there is none."""
    folders = Path(os.path.realpath(path)).parents
    return next((folder for folder in folders if any((folder / name).is_file() for name in markers)), None)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` atomically: after a crash it has either the old content or all of the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file or folder is the one at `path`, and was not moved, deleted or replaced."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


@contextmanager
def probe_file(folder: Path) -> Iterator[str]:
    """Create a small file in `folder` for the duration of the context and yield its name."""
    path = folder / f".token-{uuid.uuid4().hex}"
    try:
        path.write_text(path.name)
        fsync(path)
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def wait_until_visible(path: Path, timeout_s: float) -> bool:
    """Return whether another machine's file appears within `timeout_s`; network file systems show it with a delay."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # makes a network file system refresh its cache
        time.sleep(0.1)
    return True


def sha256(path: Path) -> str:
    """Return the hex digest of a file's content; OSError if it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_info(path: Path) -> FileInfo:
    """Return current size and hash of a file; OSError if it cannot be read."""
    return FileInfo(path.stat().st_size, sha256(path))
