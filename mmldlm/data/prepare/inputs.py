"""What a preparation reads: its inputs by format, and what their documents bring along beside text.

A format is a pair of functions: `parts(path, target_bytes)` cuts an input into stretches that can be read by
themselves, and `read(part, field)` reads one.
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
    find_files,
    read_text,
    text_parts,
)
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.readers.latents import POSITION, LatentFile
from mmldlm.data.prepare.readers.lgdlm import predecessor_parts, read_predecessor
from mmldlm.data.prepare.readers.lgdlm_arrays import DatShapes
from mmldlm.data.prepare.readers.tables import (
    Columns,
    arrow_parts,
    datasets_parts,
    is_datasets_folder,
    parquet_parts,
    read_arrow,
    read_parquet,
)
from mmldlm.data.tokenizer import BUILT_IN, Tokenizer
from mmldlm.errors import DataError
from mmldlm.utils.files import file_info

Found: TypeAlias = "Iterator[Document | Problem]"
_HASHED_AT_ONCE = 8


class FormatReader(NamedTuple):
    """How inputs of one format are cut into parts, and how a part is read. Both keep the order of the documents."""

    parts: Callable[[Path, int], list[Part]]
    read: Callable[[Part, str], Found]


def reader(format: Format, config: PrepareConfig) -> FormatReader:
    if format in TEXT_FORMATS:
        read = partial(read_text, format=format, key_field=config.key_field)
        return FormatReader(partial(text_parts, format=format), read)
    columns = Columns(config.tokens_field, config.latents_field, config.key_field)
    tables: dict[str, FormatReader] = {
        "parquet": FormatReader(parquet_parts, partial(read_parquet, columns=columns)),
        "arrow": FormatReader(arrow_parts, partial(read_arrow, columns=columns)),
        "datasets": FormatReader(datasets_parts, partial(read_arrow, columns=columns)),
    }
    if not format.startswith("predecessor"):
        return tables[format]
    shapes = DatShapes(config.dat_samples, config.dat_tokens, config.dat_latents, config.dat_pad_id)
    layout = format.removeprefix("predecessor").removeprefix("-") or None
    return FormatReader(
        partial(predecessor_parts, layout=layout, shapes=shapes), partial(read_predecessor, shapes=shapes)
    )


def find_inputs(config: PrepareConfig) -> list[tuple[Path, Format]]:
    """Every file or folder to read, with its format; DataError where an input names nothing."""
    found: list[tuple[Path, Format]] = []
    for name in config.inputs:
        if config.format and (config.format == "datasets" or config.format.startswith("predecessor")):
            folders = [Path(name)] if Path(name).is_dir() else sorted(map(Path, glob.glob(name)))  # noqa: PTH207
            if not folders or not all(folder.is_dir() for folder in folders):
                raise DataError(f"{name}: no such folder; expected one, as --format is {config.format}")
            found += [(folder, config.format) for folder in folders]
        elif not config.format and is_datasets_folder(Path(name)):
            found.append((Path(name), "datasets"))
        else:
            found += [(path, config.format or SUFFIXES.get(path.suffix, "lines")) for path in find_files([name])]
    return list(dict.fromkeys(found))


def described(inputs: list[tuple[Path, Format]], config: PrepareConfig) -> list[dict[str, Any]]:
    """What a store is made of, as its manifest names it: the inputs, and behind them latents that were precomputed.

    All of each is read, for its hash.
    """
    kind, _, latents = config.encoder.partition(":")
    beside = [Path(latents)] if kind == "precomputed" else []
    if config.latent_ids not in (None, POSITION):
        beside.append(Path(str(config.latent_ids)))
    for path in beside:
        if not path.is_file():
            raise DataError(f"{path}: no such file; expected precomputed latents, or their ids")
    with ThreadPoolExecutor(min(_HASHED_AT_ONCE, os.cpu_count() or 1)) as pool:  # hashing holds up no other thread
        return list(pool.map(_source, [*(path for path, _ in inputs), *beside]))


def _source(path: Path) -> dict[str, Any]:
    """A file or folder by name, size and hash; a folder's hash is that of its files' names and hashes."""
    try:
        if path.is_file():
            return {"file": str(path), **asdict(file_info(path))}
        digest, total, count = hashlib.sha256(), 0, 0
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            info = file_info(file)
            digest.update(f"{file.relative_to(path).as_posix()}\0{info.sha256}\n".encode())
            total, count = total + info.bytes, count + 1
        return {"folder": str(path), "files": count, "bytes": total, "sha256": digest.hexdigest()}
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot read: {error.strerror}") from None


def latent_file(config: PrepareConfig) -> LatentFile | None:
    """The precomputed latents that are asked for."""
    kind, _, path = config.encoder.partition(":")
    return LatentFile(path, config.latent_ids) if kind == "precomputed" else None


def completed(
    found: Found, config: PrepareConfig, latents: LatentFile | None = None, first: int = 0
) -> Iterator[tuple[Document | Problem, int | None]]:
    """The documents of a lot, each with text, tokens and latents as far as they are asked for, or its problem.

    With each its row of `latents`, where it has one; `first` is the place of the first of them in the whole input.
    """
    spelled = with_texts(found, config)
    if latents:
        yield from latents.attach(spelled, first)
        return
    for item in spelled:
        if isinstance(item, Problem) or (item.latents is not None) == config.imports_latents:
            yield item, None
        elif config.imports_latents:
            reason = "comes without a latent, which --encoder included needs"
            yield Problem(item.source, item.line, "no_latent", reason), None
        else:
            yield replace(item, latents=None), None


def with_texts(found: Found, config: PrepareConfig) -> Found:
    """The same, with the text of tokens where there is none. DataError without the tokenizer that made them."""
    tokenizer: Tokenizer | None = None
    for batch in batches(found):
        for item in batch:
            if isinstance(item, Document) and item.tokens is not None:
                if config.tokenizer in BUILT_IN:
                    raise DataError(
                        f"{item.source}: holds tokens, so --tokenizer is needed: the tokenizer.json that made them, or "
                        f"its folder; found {config.tokenizer}"
                    )
                tokenizer = tokenizer or Tokenizer.load(config.tokenizer)
        yield from _spelled(batch, tokenizer)


def _spelled(batch: list[Document | Problem], tokenizer: Tokenizer | None) -> Found:
    if tokenizer is None:
        yield from batch
        return
    checked = [_known(item, tokenizer) for item in batch]
    silent = [item for item in checked if isinstance(item, Document) and item.tokens is not None and not item.text]
    texts = iter(tokenizer.decode_batch([item.tokens.tolist() for item in silent]))  # type: ignore[union-attr]
    waiting = {id(item) for item in silent}
    for item in checked:
        if isinstance(item, Document) and id(item) in waiting:
            text = next(texts)
            empty = Problem(item.source, item.line, "empty", "its tokens spell nothing")
            yield replace(item, text=text) if text.strip() else empty
        else:
            yield item


def _known(item: Document | Problem, tokenizer: Tokenizer) -> Document | Problem:
    """A problem where tokens are not the tokenizer's, or stand for no text."""
    if isinstance(item, Problem) or item.tokens is None:
        return item
    bad = (item.tokens < 0) | (item.tokens >= tokenizer.vocab_size)
    bad |= (item.tokens == tokenizer.mask_id) | (item.tokens == tokenizer.pad_id)
    if not bad.any():
        return item
    place = int(np.argmax(bad))
    token = int(item.tokens[place])
    what = {tokenizer.mask_id: "[MASK]", tokenizer.pad_id: "[PAD]"}.get(token, f"not below {tokenizer.vocab_size}")
    reason = f"sample {item.key}: token {place} is {token}, {what}; expected ids of text by --tokenizer"
    return Problem(item.source, item.line, "mismatch", reason)
