"""The inputs of `mmldlm prepare`: the registry of formats, the files to read with their hashes, and chunks of them.

A **part** of an input can be read independently of the rest. One task reads one **chunk**: a part of a large input, or
several small inputs.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmldlm.errors import DataError
from mmldlm.prepare.documents import SUFFIXES, TEXT_FORMATS, Chunk, Columns, DocumentStream, Format, Part
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.readers import tables
from mmldlm.prepare.readers.files import find_files, input_info, is_url, suffix_format
from mmldlm.prepare.readers.latents import POSITION
from mmldlm.prepare.readers.text import read_text, text_parts
from mmldlm.utils.files import file_info

_TABLE_PARTS = {"parquet": tables.parquet_parts, "arrow": tables.arrow_parts, "datasets": tables.datasets_parts}


def read_part(format: Format, part: Part, config: PrepareConfig) -> DocumentStream:
    """Yield the documents and problems of a part in their order, with the fields and columns that `config` names."""
    fields = ("tokens", "latents", "key", "prefix", "group", "weight")
    columns = Columns(*(getattr(config, f"{name}_field") for name in fields))
    if format in TEXT_FORMATS:
        return read_text(part, config.field, format, columns, separator=config.separator)
    return (tables.read_parquet if format == "parquet" else tables.read_arrow)(part, config.field, columns)


def find_inputs(config: PrepareConfig) -> list[tuple[str, Format]]:
    """Return the files, URLs and folders to read with their formats, each once and in order.

    It is a `DataError` if an input matches no file or folder.
    """
    inputs: list[tuple[str, Format]] = []
    for name in config.inputs:
        if config.format == "datasets":
            folders = [Path(name)] if Path(name).is_dir() else sorted(map(Path, glob.glob(name)))  # noqa: PTH207
            if not folders or not all(folder.is_dir() for folder in folders):
                raise DataError(f"{name}: no such folder; expected one, as --format is {config.format}")
            inputs += [(str(folder), config.format) for folder in folders]
        elif not config.format and tables.is_datasets_folder(Path(name)):
            inputs.append((name, "datasets"))
        else:
            for path in find_files(name, config.format):
                format = config.format or suffix_format(path)
                if format is None:
                    raise DataError(
                        f"{path}: its suffix names no format; expected {', '.join(SUFFIXES)}, or --format lines to "
                        "read each line as a document"
                    )
                inputs.append((path, format))
    # A file that two patterns match is read once.
    return list(dict.fromkeys(inputs))


def describe_sources(inputs: list[tuple[str, Format]], config: PrepareConfig) -> list[dict[str, Any]]:
    """Return the manifest's `sources`: the inputs, then precomputed latents or another store's encoder, with hashes.

    This reads every file in full.
    """
    kind, _, latents = config.encoder.partition(":")
    more = [Path(latents)] if kind == "precomputed" else []
    if config.latent_ids not in (None, POSITION):
        more.append(Path(str(config.latent_ids)))
    for path in more:
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected precomputed latents, or their ids")
    if config.encoder_folder:
        more.append(config.encoder_folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return list(pool.map(_describe_source, [*(path for path, _ in inputs), *map(str, more)]))


def _describe_source(path: str) -> dict[str, Any]:
    """Return name, size and SHA-256 of a file or folder. A folder's hash covers the names and hashes of its files."""
    try:
        if is_url(path) or Path(path).is_file():
            return {"file": path, **asdict(input_info(path))}
        digest, total, count = hashlib.sha256(), 0, 0
        for file in sorted(file for file in Path(path).rglob("*") if file.is_file()):
            info = file_info(file)
            digest.update(f"{file.relative_to(path).as_posix()}\0{info.sha256}\n".encode())
            total, count = total + info.bytes, count + 1
        return {"folder": path, "files": count, "bytes": total, "sha256": digest.hexdigest()}
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot read: {error.strerror}") from None


def make_chunks(
    inputs: Sequence[tuple[str, Format]], sources: Sequence[dict[str, Any]], config: PrepareConfig
) -> Iterator[Chunk]:
    """Yield chunks of about `config.part_bytes`. `sources` may have latents after the inputs."""
    chunk: list[tuple[str, Part]] = []
    chunk_bytes = 0.0
    for (path, format), source in zip(inputs, sources, strict=False):
        if format in TEXT_FORMATS:
            parts = text_parts(path, config.part_bytes, format, config.separator)
        else:
            parts = _TABLE_PARTS[format](path, config.part_bytes)
        for part in parts:
            # An estimate, as rows of tables are no byte ranges. It depends on the inputs alone, as chunks must.
            part_bytes = source["bytes"] / len(parts)
            if chunk and chunk_bytes + part_bytes > config.part_bytes:
                yield tuple(chunk)
                chunk, chunk_bytes = [], 0.0
            chunk.append((format, part))
            chunk_bytes += part_bytes
    if chunk:
        yield tuple(chunk)
