"""The inputs of `mmldlm prepare`: the registry of formats, input discovery, and completion of documents.

A format is a pair of functions: `parts(path, target_bytes)` cuts an input into parts that can be read independently,
and `read(part, field)` reads one part.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mmldlm.data.prepare.documents import (
    SUFFIXES,
    TEXT_FORMATS,
    Document,
    Format,
    Part,
    Problem,
    batches,
)
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.readers.files import find_files, input_info, is_url, suffix_format
from mmldlm.data.prepare.readers.latents import POSITION, LatentFile
from mmldlm.data.prepare.readers.tables import (
    Columns,
    arrow_parts,
    datasets_parts,
    is_datasets_folder,
    parquet_parts,
    read_arrow,
    read_parquet,
)
from mmldlm.data.prepare.readers.text import read_text, text_parts
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import file_info

DocumentStream: TypeAlias = "Iterator[Document | Problem]"
_MAX_HASH_THREADS = 8


class FormatReader(NamedTuple):
    """Functions that cut inputs of one format into parts and read a part; both keep the order of the documents."""

    parts: Callable[[str, int], list[Part]]
    read: Callable[[Part, str], DocumentStream]


def get_reader(format: Format, config: PrepareConfig) -> FormatReader:
    """Return the reader of `format` with the fields and columns that `config` names."""
    if format in TEXT_FORMATS:
        read = partial(read_text, format=format, key_field=config.key_field)
        return FormatReader(partial(text_parts, format=format), read)
    columns = Columns(config.tokens_field, config.latents_field, config.key_field)
    tables: dict[str, FormatReader] = {
        "parquet": FormatReader(parquet_parts, partial(read_parquet, columns=columns)),
        "arrow": FormatReader(arrow_parts, partial(read_arrow, columns=columns)),
        "datasets": FormatReader(datasets_parts, partial(read_arrow, columns=columns)),
    }
    return tables[format]


def find_inputs(config: PrepareConfig) -> list[tuple[str, Format]]:
    """Return the files, URLs and folders to read with their formats, each once and in order.

    An input that matches no file or folder is a `DataError`.
    """
    inputs: list[tuple[str, Format]] = []
    for name in config.inputs:
        if config.format == "datasets":
            folders = [Path(name)] if Path(name).is_dir() else sorted(map(Path, glob.glob(name)))  # noqa: PTH207
            if not folders or not all(folder.is_dir() for folder in folders):
                raise DataError(f"{name}: no such folder; expected one, as --format is {config.format}")
            inputs += [(str(folder), config.format) for folder in folders]
        elif not config.format and is_datasets_folder(Path(name)):
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

    Reads every file in full to hash it.
    """
    kind, _, latents = config.encoder.partition(":")
    latent_paths = [Path(latents)] if kind == "precomputed" else []
    if config.latent_ids not in (None, POSITION):
        latent_paths.append(Path(str(config.latent_ids)))
    for path in latent_paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected precomputed latents, or their ids")
    more = [*latent_paths, *([config.encoder_folder] if config.encoder_folder else [])]
    with ThreadPoolExecutor(min(_MAX_HASH_THREADS, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return list(pool.map(_describe_source, [*(path for path, _ in inputs), *map(str, more)]))


def _describe_source(path: str) -> dict[str, Any]:
    """Return name, size and SHA-256 of a file or folder; a folder is hashed over the names and hashes of its files."""
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


def latent_file(config: PrepareConfig) -> LatentFile | None:
    """Open the file of precomputed latents, or return None if `config` names none."""
    kind, _, path = config.encoder.partition(":")
    return LatentFile(path, config.latent_ids) if kind == "precomputed" else None


def complete_documents(
    documents: DocumentStream, config: PrepareConfig, latents: LatentFile | None = None, first_position: int = 0
) -> Iterator[tuple[Document | Problem, int | None]]:
    """Yield each document with the text and latents that `config` requires, or its problem; and its row in `latents`.

    `first_position` is that of the chunk's first document in the whole input. Without latents the row is None.
    """
    documents = decode_tokens(documents, config)
    if latents:
        yield from latents.attach(documents, first_position)
        return
    for item in documents:
        if isinstance(item, Problem) or (item.latents is not None) == config.imports_latents:
            yield item, None
        elif config.imports_latents:
            reason = "has no latent, which --encoder included requires"
            yield Problem(item.source, item.line, "no_latent", reason), None
        else:
            yield replace(item, latents=None), None


def decode_tokens(documents: DocumentStream, config: PrepareConfig) -> DocumentStream:
    """Yield the documents with their tokens checked, and decoded where the text is missing."""
    if config.tokens_field is None:
        yield from documents
        return
    tokenizer = Tokenizer.load(config.tokenizer)
    for batch in batches(documents):
        yield from _decode_batch(batch, tokenizer)


def _decode_batch(batch: list[Document | Problem], tokenizer: Tokenizer) -> DocumentStream:
    checked = [_check_tokens(item, tokenizer) for item in batch]
    textless = [item for item in checked if isinstance(item, Document) and item.tokens is not None and not item.text]
    texts = iter(tokenizer.decode_batch([item.tokens.tolist() for item in textless]))  # type: ignore[union-attr]
    # By identity: documents hold arrays, which cannot be compared or hashed.
    textless_ids = {id(item) for item in textless}
    for item in checked:
        if isinstance(item, Document) and id(item) in textless_ids:
            text = next(texts)
            empty = Problem(item.source, item.line, "empty", "its tokens decode to no text")
            yield replace(item, text=text) if text.strip() else empty
        else:
            yield item


def _check_tokens(item: Document | Problem, tokenizer: Tokenizer) -> Document | Problem:
    """Return a problem if a token is outside the vocabulary or a special token that represents no text."""
    if isinstance(item, Problem) or item.tokens is None:
        return item
    invalid = (item.tokens < 0) | (item.tokens >= tokenizer.vocab_size)
    invalid |= (item.tokens == tokenizer.mask_id) | (item.tokens == tokenizer.pad_id)
    if not invalid.any():
        return item
    position = int(np.argmax(invalid))
    token = int(item.tokens[position])
    fault = {tokenizer.mask_id: "[MASK]", tokenizer.pad_id: "[PAD]"}.get(token, f"not below {tokenizer.vocab_size}")
    reason = f"sample {item.key}: token {position} is {token}, {fault}; expected ids of text by --tokenizer"
    return Problem(item.source, item.line, "mismatch", reason)
