"""The `.dat` files of LGDLM's `generate_memmap_bigfiles.py`: arrays without a header, for each rank one of tokens.

`train_rank0_tokens.dat` and `train_rank0_latents.dat` have room for more rows than there are samples. Counts and shapes
are in `global_index.json`, or have to be given.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmldlm.contrib.lgdlm.samples import Sample, SourceSample, check_latents, remove_padding
from mmldlm.errors import DataError, UsageError

INDEX = "global_index.json"


class RowType(NamedTuple):
    """Data type and shape of one sample's row."""

    dtype: np.dtype
    shape: tuple[int, ...]


class DatContents(NamedTuple):
    """Contents of `.dat` files: samples of each, and rows of tokens, [2, L] of ids and mask or [L], and of latents."""

    samples: list[int]
    tokens: RowType
    latents: RowType
    pad_id: int | None = None  # fills rows without a mask


def row_type(text: str) -> RowType:
    """Return the type that is written as in "int32:2x512"."""
    name, _, sizes = text.partition(":")
    try:
        row = RowType(np.dtype(name), tuple(int(size) for size in sizes.split("x")))
    except (TypeError, ValueError):
        row = RowType(np.dtype(object), ())
    if row.dtype.kind not in "iuf" or min(row.shape) < 1:
        raise ArgumentTypeError(f"{text}: expected type and shape of a row, such as int32:2x512")
    return row


def read_dat(source: Path, contents: DatContents | None) -> Iterator[SourceSample]:
    """Yield tokens and latents of the same row, rank by rank; `contents` are by default those of `global_index.json`.

    Raises:
        DataError: Files contradict `contents` or each other.
        UsageError: `contents` are missing or incomplete.
    """
    names = [path.name.removesuffix("_tokens.dat") for path in source.glob("*_tokens.dat")]
    # By number: rank 10 follows rank 9, in the order of `--dat-samples`.
    names.sort(key=lambda name: (*map(int, re.findall(r"\d+", name)), name))
    contents = contents or _read_index(source / INDEX, names)
    if len(contents.samples) != len(names):
        raise UsageError(f"--dat-samples: {len(contents.samples)} numbers, expected one for each of {', '.join(names)}")
    if len(contents.tokens.shape) == 1 and contents.pad_id is None:
        raise UsageError("--dat-tokens: rows without masks need --dat-pad-id, the id that fills them")
    for name, count in zip(names, contents.samples, strict=True):
        path = source / f"{name}_tokens.dat"
        tokens = _map_rows(path, contents.tokens, count)
        latents = _map_rows(source / f"{name}_latents.dat", contents.latents, count)
        if len(tokens) != len(latents):
            raise DataError(f"{path}: room for {len(tokens)} samples, but {len(latents)} of latents; expected as many")
        texts = source / f"{name}_texts.txt"
        if texts.is_file():
            with texts.open(encoding="utf-8", errors="replace") as file:
                num_lines = sum(1 for _ in file)
            # Row i of the latents is the embedding of line i, also where a text had several lines.
            if num_lines != count:
                raise DataError(
                    f"{texts}: {num_lines} lines, expected {count}; the latents are not those of the tokens"
                )
        for row in range(count):
            read = partial(_read_row, f"{name}-{row}", tokens[row], latents[row], contents.pad_id)
            yield SourceSample(f"{path}: row {row}", read)


def _read_index(path: Path, names: list[str]) -> DatContents:
    """Return the contents of the files `names` that LGDLM wrote down; it always used these types, and masks."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected it, or --dat-samples, --dat-tokens and --dat-latents")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        counts = {str(name): int(count) for name, count in zip(index["files"], index["samples_per_rank"], strict=True)}
        tokens, latents = row_type(f"int32:2x{index['max_length']}"), row_type(f"float32:{index['embedding_dim']}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ArgumentTypeError):
        counts = {}
    if sorted(counts) != sorted(names) or min(counts.values()) < 0:
        raise DataError(
            f"{path}: expected max_length, embedding_dim, and files and samples_per_rank of {', '.join(names)}"
        )
    return DatContents([counts[name] for name in names], tokens, latents)


def _map_rows(path: Path, row: RowType, count: int) -> np.ndarray:
    """Memory-map a file as [room, *row.shape]; its first `count` rows are samples."""
    row_bytes = row.dtype.itemsize * int(np.prod(row.shape))
    size = path.stat().st_size if path.is_file() else 0
    if not size or size % row_bytes:
        raise DataError(f"{path}: {size} bytes, expected rows of {row.dtype} {list(row.shape)}, {row_bytes} bytes each")
    rows = np.memmap(path, row.dtype, "r", shape=(size // row_bytes, *row.shape))
    if len(rows) < count:
        raise DataError(f"{path}: room for {len(rows)} samples, expected {count}")
    # The room behind the samples was never written, so it is zeros; anything else means that the count is too low.
    if len(rows) > count and rows[count].any():
        raise DataError(f"{path}: row {count} is not empty, expected {count} samples")
    return rows


def _read_row(id: str, tokens: np.ndarray, latents: np.ndarray, pad_id: int | None) -> Sample:
    if tokens.ndim > 1:
        return Sample(id, check_latents(latents), remove_padding(*tokens[:2]))
    # Up to the last other id, as the pad id may also occur within a text.
    used = np.flatnonzero(tokens != pad_id)
    if not len(used):
        raise DataError(f"no tokens: all are the pad id {pad_id}")
    return Sample(id, check_latents(latents), tokens[: used[-1] + 1].astype(np.int64))
