"""Samples to convert, and checks of their arrays.

Shape letters: L tokens with padding, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmldlm.errors import DataError
from mmldlm.prepare.readers import latents

_MAX_ARCHIVE_BYTES = 1 << 26  # of one sample's tokens, uncompressed. Larger archives are not read into memory


class Sample(NamedTuple):
    """A sample: its latents float32 [M, C], and its tokens int64 (without padding) or its text."""

    id: str
    latents: np.ndarray
    content: np.ndarray | str


class SourceSample(NamedTuple):
    """The location of a sample for messages, and the function that reads it or raises `DataError`."""

    location: str
    read: Callable[[], Sample]


def read_token_archive(path: Path) -> np.ndarray:
    """Return the tokens of a `.npz` file of `input_ids` and `attention_mask` without padding."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            # Read the archive's directory before unpacking anything.
            size = sum(member.file_size for member in archive.zip.infolist())
            if size > _MAX_ARCHIVE_BYTES:
                raise ValueError(f"{size} bytes uncompressed, expected at most {_MAX_ARCHIVE_BYTES}")
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # zipfile, NumPy and the system raise many types
        raise DataError(f"{path}: not a readable archive of arrays ({' '.join(str(error).split())})") from None
    ids = next((arrays[name] for name in ("input_ids", "tokens", "ids") if name in arrays), None)
    mask = next((arrays[name] for name in ("attention_mask", "mask") if name in arrays), None)
    if ids is None or mask is None:
        names = ", ".join(arrays) or "none"
        raise DataError(f"{path}: holds the arrays {names}, expected input_ids and attention_mask")
    return remove_padding(ids, mask)


def remove_padding(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the ids, int64, where the mask is 1. Both are [L] or [1, L].

    It is a `DataError` if shapes or types are wrong, or the mask is not ones followed by zeros.
    """
    if ids.shape != mask.shape or ids.shape not in ((ids.size,), (1, ids.size)):
        raise DataError(f"ids {list(ids.shape)} and mask {list(mask.shape)}, expected both [L] or [1, L]")
    if ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        raise DataError(f"ids are {ids.dtype} and mask {mask.dtype}, expected integers")
    ids, mask = ids.reshape(-1), mask.reshape(-1)
    length = int(np.count_nonzero(mask))
    if not np.array_equal(mask, np.arange(len(mask)) < length):
        raise DataError(f"the mask is not {length} ones and then zeros, so the true length is unknown")
    if not length:
        raise DataError("no tokens: the mask is all zeros")
    return ids[:length].astype(np.int64)


def check_latents(array: np.ndarray) -> np.ndarray:
    """Return latents float32 [M, C] of a float array [C] or [M, C].

    It is a `DataError` if shape or type is wrong, or the latents are all zeros or not finite in float32.
    """
    with np.errstate(over="ignore"):
        # Convert before the check for finite values: float64 may overflow in float32.
        result = latents.as_latents(array.astype(np.float32) if array.dtype.kind == "f" else array)
    if isinstance(result, tuple):
        raise DataError(result[1])
    return result
