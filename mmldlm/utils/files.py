"""Durable writes, hashes and visibility of files, for data stores, checkpoints and run folders."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

_CHUNK = 1 << 20
_MAX_TEXT_BYTES = 64 << 20  # largest file that we read whole
_MAX_HOLE_BYTES, _MIN_STORED_SHARE = 16 << 20, 0.01  # a larger file must have this share on the disk


@dataclass(frozen=True)
class FileInfo:
    """Size and SHA-256 of a file, as stored in manifests."""

    bytes: int
    sha256: str


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add a file name to an OSError that has none, for example when the disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
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
    """Return the nearest folder above `path` that contains a file with one of these names, or None."""
    folders = Path(os.path.realpath(path)).parents
    return next((folder for folder in folders if any((folder / name).is_file() for name in markers)), None)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` atomically: after a crash, it is either all old or all new."""
    temporary = temporary_name(path)
    with naming(path):
        try:
            with temporary.open("xb") as file:  # a new file that nobody else uses
                file.write(content.encode() if isinstance(content, str) else content)
            fsync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    fsync(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a new name next to `path` that no other process uses."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still this open file or folder: not moved, deleted or replaced."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


@contextmanager
def probe_file(folder: Path) -> Iterator[str]:
    """Create a small file in `folder`, yield its name, and remove the file at the end."""
    path = folder / f".token-{uuid.uuid4().hex}"
    try:
        path.write_text(path.name)
        fsync(path)
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def wait_until_visible(path: Path, timeout_s: float) -> bool:
    """Wait for another machine's file, which network file systems show late, and return whether it appeared."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            list(path.parent.iterdir())  # makes a network file system refresh its cache
        time.sleep(0.1)
    return True


def check_inside(path: Path, folder: Path) -> None:
    """Raise OSError if a link takes `path` outside of `folder`, which may come from a stranger.

    The folder itself may be a link. Files that huggingface_hub has downloaded are links into the `blobs` of their
    model, which are allowed.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_blob = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    if not target.is_relative_to(root) and not is_blob:
        raise OSError(errno.EPERM, f"is a link that leads outside {folder}", str(path))


def open_regular(path: Path, folder: Path | None = None) -> BufferedReader:
    """Open a file that may come from a stranger, or raise OSError if reading it might never end.

    Such a file is a pipe, a device, or claims terabytes without taking space on the disk. With `folder`, the file must
    be inside it, see `check_inside`.
    """
    if folder is not None:
        check_inside(path, folder)
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    file = path.open("rb")
    info = os.fstat(file.fileno())
    is_sparse = info.st_size > max(_MAX_HOLE_BYTES, 512 * info.st_blocks / _MIN_STORED_SHARE)
    # Some network file systems do not count blocks, but these do not know holes either.
    if is_sparse and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < info.st_size:
        file.close()
        raise OSError(errno.EINVAL, f"has {info.st_size} bytes, of which {512 * info.st_blocks} are stored", str(path))
    file.seek(0)
    return file


def read_regular(path: Path, folder: Path | None = None) -> bytes:
    """Read a file that may come from a stranger. Above 64 MiB, and as in `open_regular`, this is an OSError."""
    with open_regular(path, folder) as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise OSError(errno.EFBIG, f"has more than {_MAX_TEXT_BYTES >> 20} MiB", str(path))
    return content


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits, or raise OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_info(path: Path) -> FileInfo:
    """Return a file's current size and hash, or raise OSError if it cannot be read."""
    return FileInfo(path.stat().st_size, sha256(path))
