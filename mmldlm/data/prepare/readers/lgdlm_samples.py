"""What the predecessor's layouts have in common: arrays of a sample, and why one cannot be had.

Shape letters: L tokens with padding, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np

from mmldlm.data.prepare.documents import Document, Part, Problem, ProblemKind

Fault: TypeAlias = "tuple[ProblemKind, str]"  # why a sample cannot be had


def even_parts(path: Path, count: int, bytes_each: float, target_bytes: int) -> list[Part]:
    """`count` samples in stretches of about `target_bytes`."""
    step = max(1, int(target_bytes / max(1.0, bytes_each)))
    return [Part(str(path), start, min(start + step, count)) for start in range(0, count, step)]


def load_array(path: Path) -> np.ndarray | Fault:
    """The array of an .npy file, or why it cannot be had."""
    try:
        found = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy's and the system's own kinds
        return "unreadable", f"not a readable array ({' '.join(str(error).split())})"
    return found if isinstance(found, np.ndarray) else ("unreadable", "an archive of arrays, expected one array")


def true_tokens(ids: np.ndarray, mask: np.ndarray) -> np.ndarray | Fault:
    """int64 [L] of ids and mask [L] or [1, L]: what the mask leaves, or why it cannot be had."""
    if ids.shape != mask.shape or ids.shape not in ((ids.size,), (1, ids.size)):
        return "mismatch", f"ids {list(ids.shape)} and mask {list(mask.shape)}, expected both [L] or [1, L]"
    if ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        return "invalid", f"ids are {ids.dtype} and mask {mask.dtype}, expected integers"
    ids, mask = ids.reshape(-1), mask.reshape(-1)
    length = int(np.count_nonzero(mask))
    if not np.array_equal(mask, np.arange(len(mask)) < length):
        return "invalid", f"the mask is not {length} ones and then zeros, so the true length is unknown"
    if not length:
        return "empty", "no tokens: the mask is all zeros"
    return ids[:length].astype(np.int64)


def as_latents(found: np.ndarray | Fault) -> np.ndarray | Fault:
    """float [M, C] of an array [C], [1, C] or [M, C], or why it is no latent."""
    if isinstance(found, tuple):
        return found
    if found.dtype.kind != "f" or found.ndim not in (1, 2) or not found.size:
        return "mismatch", f"the latent is {found.dtype} {list(found.shape)}, expected float [C], [1, C] or [M, C]"
    if not np.isfinite(found).all():
        return "no_latent", "the latent is not finite"
    if not found.any():
        # What trainers before this one put where they could not read or encode.
        return "no_latent", "the latent is all zeros"
    return np.atleast_2d(found)


def sample(
    source: str, line: int, key: str, tokens: np.ndarray | Fault, latents: np.ndarray | Fault
) -> Document | Problem:
    """A document of tokens and latents, or the problem of either."""
    for found in (tokens, latents):
        if isinstance(found, tuple):
            return Problem(source, line, found[0], f"sample {key}: {found[1]}")
    assert isinstance(tokens, np.ndarray) and isinstance(latents, np.ndarray)
    return Document("", source, line, tokens=tokens, latents=latents, key=key)
