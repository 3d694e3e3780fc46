"""Read the `.dat` files of LGDLM's `generate_memmap_bigfiles.py`: arrays without a header, two for each rank.

`train_rank0_tokens.dat` and `train_rank0_latents.dat` have room for more rows than there are samples. Counts and shapes
are in `global_index.json`. A run on one GPU did not write that file, so users have to write it by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from mmldlm.contrib.lgdlm.samples import Sample, SourceSample, check_latents, remove_padding
from mmldlm.errors import DataError

INDEX = "global_index.json"
_INDEX_KEYS = "files, samples_per_rank, max_length or tokens: int32:2x512, and embedding_dim or latents: float32:1024"


def read_dat(source: Path) -> Iterator[SourceSample]:
    """Yield tokens and latents of the same row, rank by rank. Files that contradict the index are a `DataError`."""
    names = [path.name.removesuffix("_tokens.dat") for path in source.glob("*_tokens.dat")]
    names.sort(key=lambda name: (*map(int, re.findall(r"\d+", name)), name))  # by number: rank 10 follows rank 9
    samples, token_row, latent_row, pad_id = _read_index(source / INDEX, names)
    for name, count in samples.items():
        path = source / f"{name}_tokens.dat"
        tokens = _map_rows(path, token_row, count)
        latents = _map_rows(source / f"{name}_latents.dat", latent_row, count)
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
            read = partial(_read_row, f"{name}-{row}", tokens[row], latents[row], pad_id)
            yield SourceSample(f"{path}: row {row}", read)


def _read_index(path: Path, names: list[str]) -> tuple[dict[str, int], np.dtype, np.dtype, int | None]:
    """Read the index of the files `names`, which LGDLM wrote, or a user with other types of rows.

    Returns:
        The number of samples by name in the order of ranks, the type of a row of tokens ([2, L] for ids and mask, or
        [L] for ids alone), the type of a row of latents, and the id that fills rows without a mask.
    """
    if not path.is_file():
        raise DataError(f"{path}: missing; expected a JSON object of {_INDEX_KEYS}")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        counts = {str(name): int(count) for name, count in zip(index["files"], index["samples_per_rank"], strict=True)}
        tokens = _row_type(index.get("tokens") or f"int32:2x{index['max_length']}")
        latents = _row_type(index.get("latents") or f"float32:{index['embedding_dim']}")
        samples, pad_id = {name: counts[name] for name in names}, index.get("pad_id")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        counts = {}
    if not counts or sorted(counts) != sorted(names) or min(counts.values()) < 0:
        raise DataError(f"{path}: expected {_INDEX_KEYS}, for the files {', '.join(names)}")
    if tokens.ndim == 1 and not isinstance(pad_id, int):
        raise DataError(f"{path}: tokens without masks need pad_id, the id that fills their rows")
    return samples, tokens, latents, pad_id


def _row_type(text: str) -> np.dtype:
    """Parse the type of a row, e.g. "int32:2x512", or raise `ValueError` or `TypeError`."""
    name, _, sizes = text.partition(":")
    row = np.dtype((name, tuple(int(size) for size in sizes.split("x"))))
    if row.base.kind not in "iuf" or min(row.shape) < 1:
        raise ValueError(text)
    return row


def _map_rows(path: Path, row: np.dtype, count: int) -> np.ndarray:
    """Memory-map a file as [room, *row.shape], where the first `count` rows are samples."""
    size = path.stat().st_size if path.is_file() else 0
    if not size or size % row.itemsize:
        expected = f"rows of {row.base} {list(row.shape)}, {row.itemsize} bytes each"
        raise DataError(f"{path}: {size} bytes, expected {expected}")
    rows = np.memmap(path, row.base, "r", shape=(size // row.itemsize, *row.shape))
    if len(rows) < count:
        raise DataError(f"{path}: room for {len(rows)} samples, expected {count}")
    # The room after the samples was never written, so it is zeros. Anything else means that the count is too low.
    if len(rows) > count and rows[count].any():
        raise DataError(f"{path}: row {count} is not empty, expected {count} samples")
    return rows


def _read_row(id: str, tokens: np.ndarray, latents: np.ndarray, pad_id: int | None) -> Sample:
    if tokens.ndim > 1:
        return Sample(id, check_latents(latents), remove_padding(*tokens[:2]))
    # Keep all up to the last other id, as the pad id may also occur within a text.
    used = np.flatnonzero(tokens != pad_id)
    if not len(used):
        raise DataError(f"no tokens: all are the pad id {pad_id}")
    return Sample(id, check_latents(latents), tokens[: used[-1] + 1].astype(np.int64))
