"""Input files, on this machine or behind a URL such as s3://, gs://, hf:// or https://, which fsspec reads.

Most protocols need a package for fsspec: s3fs, gcsfs or aiohttp. Zstandard needs the extra `tables`.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from mmldlm.errors import DataError, MmldlmError, UsageError
from mmldlm.prepare.documents import SUFFIXES, TEXT_FORMATS, Format
from mmldlm.utils.files import FileInfo
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import print_status
from mmldlm.utils.versions import install_command

_BUFFER_BYTES = 1 << 20
_MAX_NAMED = 3  # of the files that we leave out of a folder


def is_url(path: str) -> bool:
    """Return whether a path names a file that fsspec reads."""
    return "://" in path


def open_input(path: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: A local file cannot be opened.
        DataError: A URL cannot be read.
        UsageError: A package is missing.
    """
    if not is_url(path):
        return Path(path).open("rb")
    with _reading(path):
        import fsspec

        return cast(BinaryIO, io.BufferedReader(fsspec.open(path, "rb").open(), _BUFFER_BYTES))


def pyarrow() -> Any:
    """Import and return pyarrow, or raise `UsageError` with the extra to install."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"Parquet, Arrow and .zst files need pyarrow: {install_command('tables')}") from None
    return pyarrow


def _open_zstd(file: BinaryIO) -> Any:
    # Not by fsspec, which reads only the first of several frames.
    return io.BufferedReader(pyarrow().CompressedInputStream(file, "zstd"), _BUFFER_BYTES)


_DECOMPRESSED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def is_compressed(path: str) -> bool:
    """Return whether `open_text` decompresses a file. Its parts can then not be read independently."""
    return PurePosixPath(path).suffix.lower() in _DECOMPRESSED


def suffix_format(path: str) -> Format | None:
    """Return the format of a file, perhaps compressed, by its suffix, or None for an unknown suffix."""
    name = PurePosixPath(path.lower())
    format = SUFFIXES.get((name.with_suffix("") if is_compressed(path) else name).suffix)
    return format if format in TEXT_FORMATS or not is_compressed(path) else None


@contextmanager
def open_text(path: str) -> Iterator[BinaryIO]:
    """Open a file of text for reading, and decompress it if its suffix says that it is compressed.

    Raises:
        DataError: The file cannot be read.
        UsageError: A package is missing.
    """
    decompress = _DECOMPRESSED.get(PurePosixPath(path).suffix.lower(), nullcontext)
    try:
        with open_input(path) as file, decompress(file) as contents:
            yield contents
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # also raised by pyarrow, or for damage
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from None


def input_info(path: str) -> FileInfo:
    """Return size and SHA-256 of a file, reading it in full. It raises the errors of `open_input`."""
    digest, size = hashlib.sha256(), 0
    with open_input(path) as file:
        while block := file.read(_BUFFER_BYTES):
            digest.update(block)
            size += len(block)
    return FileInfo(size, digest.hexdigest())


def find_files(name: str, format: Format | None = None) -> list[str]:
    """Return the sorted files that a path, URL, glob pattern or folder names, or raise `DataError` if there are none.

    A folder is searched recursively for the suffixes of `format` (`blocks` has the suffixes of `lines`), or of all
    formats. A notice says how many other files it has.
    """
    if is_url(name):
        files = _find_url(name, format)
    elif Path(name).is_file():
        files = [str(Path(name))]
    elif Path(name).is_dir():
        in_folder = sorted(file for file in Path(name).rglob("*") if file.is_file())
        files = _choose(name, map(str, in_folder), format)
    else:
        matches = map(Path, glob.glob(name, recursive=True))  # noqa: PTH207
        files = [str(file) for file in sorted(file for file in matches if file.is_file())]
    if not files:
        raise DataError(f"{name}: no such file; expected a text file, a folder or a glob pattern")
    return files


def _choose(folder: str, files: Iterable[str], format: Format | None) -> list[str]:
    """Return the files of a folder that we can read, and print a notice about the others."""
    wanted = "lines" if format == "blocks" else format
    chosen, others = list[str](), list[str]()
    for file in files:
        found = suffix_format(file)
        (chosen if found and wanted in (None, found) else others).append(file)
    if not chosen:
        suffixes = [suffix for suffix, found in SUFFIXES.items() if wanted in (None, found)]
        raise DataError(f"{folder}: no file in this folder ends in {', '.join(suffixes)}")
    if others:
        names = ", ".join(others[:_MAX_NAMED]) + ", ..." * (len(others) > _MAX_NAMED)
        print_status(printable(f"{folder}: leaving out {len(others)} files of another format: {names}"))
    return chosen


def _find_url(name: str, format: Format | None) -> list[str]:
    with _reading(name):
        import fsspec

        system, path = fsspec.core.url_to_fs(name)
        if "*" in name:
            return sorted(system.unstrip_protocol(file) for file in system.glob(path) if system.isfile(file))
        if system.isfile(path):
            return [name]
        if system.isdir(path):
            return _choose(name, sorted(map(system.unstrip_protocol, system.find(path))), format)
        return []


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Convert the many kinds of errors of fsspec's file systems."""
    try:
        yield
    except MmldlmError:
        raise  # raised in the caller's block, with its cause in the message
    except ImportError as error:
        raise UsageError(f"{url}: {error}; expected the package that reads such URLs") from None
    except Exception as error:
        raise DataError(f"{url}: cannot read: {' '.join(str(error).split()) or type(error).__name__}") from None
