"""The samples of a store that are nearest to given latents.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmldlm.data.store import Split, Store

_ROWS = 8192  # latents compared at a time


def directions(latents: np.ndarray) -> np.ndarray:
    """[n, M C]: each of the latents [n, M, C], or [n, D], at length 1."""
    flat = latents.reshape(len(latents), -1)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def latent_blocks(split: Split) -> Iterator[np.ndarray]:
    """float64 [rows, M, C] of all samples, in order, on the encoder's scale."""
    for shard in split.shards:
        for first in range(0, len(shard.latents), _ROWS):
            yield shard.latents[first : first + _ROWS].astype(np.float64)


def neighbors_of(
    store: Store, split: Split, latents: np.ndarray, count: int, but: Sequence[int | None] = ()
) -> list[list[tuple[int, float]]]:
    """For each of `latents` [n, M, C], on the encoder's scale, the `count` nearest rows of `split` and their cosines.

    Nearest is the largest cosine of standardized latents: without their mean, which all samples share. `but` names a
    row for each latent that does not count, such as its own. Reads all latents of the split.
    """
    wanted, first = directions(store.standardize(latents)), 0
    best: list[list[tuple[float, int]]] = [[] for _ in latents]
    for block in latent_blocks(split):
        cosines = wanted @ directions(store.standardize(block)).T
        for index, row in enumerate(but):
            if row is not None and first <= row < first + len(block):
                cosines[index, row - first] = -np.inf
        for index, found in enumerate(best):
            top = np.argsort(-cosines[index], kind="stable")[:count]
            found += [(float(cosines[index, place]), first + int(place)) for place in top if cosines[index, place] > -2]
            best[index] = sorted(found, key=lambda pair: (-pair[0], pair[1]))[:count]
        first += len(block)
    return [[(row, cosine) for cosine, row in found] for found in best]
