"""Input files, on this machine or behind a URL such as s3://, gs://, hf:// or https://, which fsspec reads.

Reading URLs needs the extra `cluster`, and for most protocols a package of fsspec: s3fs, gcsfs, aiohttp.
"""

from __future__ import annotations

import glob
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from mmldlm.data.prepare.documents import SUFFIXES
from mmldlm.errors import DataError, MmldlmError, UsageError
from mmldlm.utils.files import FileInfo

_BUFFER_BYTES = 1 << 20


def is_url(path: str) -> bool:
    """Return whether a path names a file that fsspec reads."""
    return "://" in path


def open_input(path: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: A file of this machine cannot be opened.
        DataError: A URL cannot be read.
        UsageError: A package that its protocol needs is missing.
    """
    if not is_url(path):
        return Path(path).open("rb")
    with _fsspec(path) as fsspec:
        return cast(BinaryIO, io.BufferedReader(fsspec.open(path, "rb").open(), _BUFFER_BYTES))


def input_info(path: str) -> FileInfo:
    """Return size and SHA-256 of a file, for which it is read in full; errors are those of `open_input`."""
    digest, size = hashlib.sha256(), 0
    with open_input(path) as file:
        while block := file.read(_BUFFER_BYTES):
            digest.update(block)
            size += len(block)
    return FileInfo(size, digest.hexdigest())


def find_files(name: str) -> list[str]:
    """Return the sorted files that a path, URL, glob pattern or folder names.

    A folder is searched recursively for the suffixes in `SUFFIXES`.

    Raises:
        DataError: The name matches no file.
    """
    return _find_url(name) if is_url(name) else _find_local(name)


def _find_local(name: str) -> list[str]:
    path = Path(name)
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        return list(map(str, files)) or _no_file(name, is_folder=True)
    files = sorted(file for file in map(Path, glob.glob(name, recursive=True)) if file.is_file())  # noqa: PTH207
    return list(map(str, files)) or _no_file(name)


def _find_url(name: str) -> list[str]:
    with _fsspec(name) as fsspec:
        system, path = fsspec.core.url_to_fs(name)
        if "*" not in name and system.isfile(path):
            return [name]
        is_folder = "*" not in name and system.isdir(path)
        result = system.find(path) if is_folder else system.glob(path) if "*" in name else []
        files = sorted(
            system.unstrip_protocol(file)
            for file in result
            if (PurePosixPath(file).suffix in SUFFIXES if is_folder else system.isfile(file))
        )
    return files or _no_file(name, is_folder)


def _no_file(name: str, is_folder: bool = False) -> list[str]:
    if is_folder:
        raise DataError(f"{name}: no file in this folder ends in {', '.join(SUFFIXES)}")
    raise DataError(f"{name}: no such file; expected a text file, a folder or a glob pattern")


@contextmanager
def _fsspec(url: str) -> Iterator[Any]:
    """Yield fsspec, and convert the errors of its file systems, which are of many kinds."""
    try:
        import fsspec

        yield fsspec
    except MmldlmError:
        raise  # an error of the caller's block, which names its cause already
    except ImportError as error:
        raise UsageError(f"{url}: {error}; expected what pip install mmldlm[cluster] and this message name") from None
    except Exception as error:
        raise DataError(f"{url}: cannot read: {' '.join(str(error).split()) or type(error).__name__}") from None
