"""Durable writes, hashes and sightings of files, for the data store, the checkpoints and the run folder alike."""

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
    """Size and SHA-256 of a file, as a manifest holds them."""

    bytes: int
    sha256: str


def fsync(path: Path) -> None:
    """Make a file's contents, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and what is missing above it, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        fsync(folder.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """`path` holds either what it held before or all of `content`, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


@contextmanager
def token(folder: Path) -> Iterator[str]:
    """The name of a small new file that is in `folder` within; OSError where it cannot be written."""
    name = f".token-{uuid.uuid4().hex}"
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            os.write(descriptor, name.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield name
    finally:
        (folder / name).unlink(missing_ok=True)


def wait_until_visible(path: Path, seconds: float) -> bool:
    """Whether a file that another machine has made is seen here in time: network file systems show it late."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # has a network file system look again
        time.sleep(0.1)
    return True


def sha256(path: Path) -> str:
    """Hex digest of a file's contents; OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_info(path: Path) -> FileInfo:
    """Of the file as it is now; OSError where it cannot be read."""
    return FileInfo(path.stat().st_size, sha256(path))
