"""Nearest neighbors among the samples of a store: of latents, and of texts.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

import numpy as np
import torch

from mmldlm.data.dataset import Split
from mmldlm.data.store import Store

_BLOCK_SAMPLES = 8192
_MAX_TEXTS = 100_000  # that are searched for the most similar one
_CANDIDATES = 5  # that are compared token by token


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


def draw_samples(split: Split, count: int, seed: int) -> np.ndarray:
    """Return the ascending indices of up to `count` good samples of `split`, drawn at random."""
    drawn = np.random.default_rng(seed).permutation(len(split))
    return np.sort(drawn[~np.isin(drawn, split.skipped)][:count])


def sparse_counts(texts: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> torch.Tensor:
    """Return how often each token occurs in each text, sparse float64 [n, V]."""
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.arange(len(texts)).repeat_interleave(lengths)
    columns = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *texts]).astype(np.int64))
    ones = torch.ones(len(columns), dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), ones, (len(texts), vocab_size)).coalesce()


class TextIndex:
    """The texts of a split, to find the one that is most similar to another text.

    Args:
        split: Its samples are the texts; of more than 100,000, as many are drawn.
        seed: Seed of the draw.
    """

    def __init__(self, split: Split, seed: int):
        tokens, lengths, _ = split.gather(draw_samples(split, _MAX_TEXTS, seed))
        self._texts = np.split(tokens, lengths.cumsum()[:-1])
        counts = sparse_counts(self._texts, split.manifest.vocab_size)
        self._contains = torch.sparse_coo_tensor(counts.indices(), torch.ones_like(counts.values()), counts.shape)
        self._sizes = torch.sparse.sum(self._contains, 1).to_dense()  # distinct tokens

    def similarity(self, text: Sequence[int]) -> float:
        """Return the similarity of `text` to the most similar text of the split, 1 if they are equal.

        The similarity is 2 x common tokens, in the same order, / tokens of both (`difflib.SequenceMatcher`). Compared
        are the texts with the most distinct tokens in common, so it is a lower bound.
        """
        wanted = torch.zeros(self._contains.shape[1], dtype=torch.float64)
        wanted[list(text)] = 1.0
        overlap = (self._contains @ wanted) / (self._sizes + wanted.sum())
        nearest = overlap.topk(min(_CANDIDATES, len(overlap))).indices.tolist()
        own = list(text)
        return max(SequenceMatcher(None, own, self._texts[row].tolist(), autojunk=False).ratio() for row in nearest)
