"""Nearest neighbors of latents among the samples of a store.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mmldlm.data.dataset import Split
from mmldlm.data.store import Store

_BLOCK_SAMPLES = 8192


def unit_vectors(latents: np.ndarray) -> np.ndarray:
    """Flatten latents [n, M, C] or [n, D] and scale each to norm 1: [n, M C] or [n, D]."""
    flat = latents.reshape(len(latents), -1)
    # A zero vector stays zero and has cosine 0 with all others.
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def latent_blocks(split: Split) -> Iterator[np.ndarray]:
    """Yield the latents of all samples in order, on the encoder's scale, in blocks float64 [block, M, C]."""
    for shard in split.shards:
        for first in range(0, len(shard.latents), _BLOCK_SAMPLES):
            yield shard.latents[first : first + _BLOCK_SAMPLES].astype(np.float64)


def nearest_neighbors(
    store: Store, split: Split, latents: np.ndarray, count: int, exclude: Sequence[int | None] = ()
) -> list[list[tuple[int, float]]]:
    """Find the samples of `split` whose latents have the largest cosine with each of `latents`.

    The cosine is that of standardized latents, that is, without the mean that all samples share. Reads all latents of
    the split.

    Args:
        store: The store that standardizes the latents.
        split: Samples to search.
        latents: [n, M, C] on the encoder's scale.
        count: Neighbors per latent.
        exclude: For each latent, the index of a sample that does not count (such as its own), or None.

    Returns:
        For each latent, (index, cosine) of its neighbors, the nearest first.
    """
    queries, first = unit_vectors(store.standardize(latents)), 0
    best: list[list[tuple[float, int]]] = [[] for _ in latents]
    for block in latent_blocks(split):
        cosines = queries @ unit_vectors(store.standardize(block)).T  # [n, block]
        for query, index in enumerate(exclude):
            if index is not None and first <= index < first + len(block):
                cosines[query, index - first] = -np.inf
        for query, candidates in enumerate(best):
            top = np.argsort(-cosines[query], kind="stable")[:count]
            # Excluded samples are at -inf, below any cosine.
            candidates += [(float(cosines[query, i]), first + int(i)) for i in top if cosines[query, i] > -2]
            best[query] = sorted(candidates, key=lambda pair: (-pair[0], pair[1]))[:count]
        first += len(block)
    return [[(index, cosine) for cosine, index in neighbors] for neighbors in best]
