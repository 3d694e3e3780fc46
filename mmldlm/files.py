"""Durable writes and hashes of files, for the data store and the checkpoints alike."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_CHUNK = 1 << 20


def fsync(path: Path) -> None:
    """Make a file's contents, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str | bytes) -> None:
    """`path` holds either what it held before or all of `content`, whatever happens in between."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)


def sha256(path: Path) -> str:
    """Hex digest of a file's contents; OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
