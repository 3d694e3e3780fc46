"""Nearest neighbors among the samples of a store, by latents and by texts.

Shape letters: n latents, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np
import torch

from mmldlm.data.store import Split, Store

_BLOCK_SAMPLES = 8192
_MAX_TEXTS = 100_000  # of an index


def unit_vectors(latents: np.ndarray) -> np.ndarray:
    """Flatten latents [n, M, C] or [n, D] and scale each to norm 1: [n, M C] or [n, D]."""
    flat = latents.reshape(len(latents), -1)
    # A zero vector stays zero and has cosine 0 with all others.
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12)


def nearest_neighbors(
    store: Store, split: Split, latents: np.ndarray, count: int, exclude: Sequence[int | None] = ()
) -> list[list[tuple[int, float]]]:
    """Find the `count` nearest samples of each of `latents` [n, M, C], and return (index, cosine) of each.

    Latents are on the encoder's scale. The cosine is between latents standardized by `store`, that is, without the mean
    that all samples share, and only of those that the manifest says are compared. `exclude` has one sample per latent
    that does not count (for example its own), or None.
    """
    queries, first = unit_vectors(store.standardize(latents)[:, store.manifest.compared]), 0
    best: list[list[tuple[float, int]]] = [[] for _ in latents]
    blocks = (
        shard.latents[start : start + _BLOCK_SAMPLES].astype(np.float64)
        for shard in split.shards
        for start in range(0, len(shard.latents), _BLOCK_SAMPLES)
    )
    for block in blocks:
        cosines = queries @ unit_vectors(store.standardize(block)[:, store.manifest.compared]).T  # [n, block]
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


def draw_samples(split: Split, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the indices of up to `count` good samples of `split`, drawn at random and in random order."""
    drawn = rng.permutation(len(split))
    return drawn[~np.isin(drawn, split.skipped)][:count]


def sparse_counts(texts: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> torch.Tensor:
    """Count each token in each text, sparse float64 [n, V]."""
    lengths = torch.tensor([len(text) for text in texts])
    rows = torch.arange(len(texts)).repeat_interleave(lengths)
    columns = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *texts]).astype(np.int64))
    ones = torch.ones(len(columns), dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]), ones, (len(texts), vocab_size), check_invariants=False
    ).coalesce()


class TextIndex:
    """Index over texts (token ids below `vocab_size`) that finds the text most similar to another one."""

    def __init__(self, texts: Sequence[np.ndarray], vocab_size: int):
        self.texts, self._counts = texts, sparse_counts(texts, vocab_size)
        self.lengths = torch.tensor([len(text) for text in texts], dtype=torch.float64)

    @property
    def token_counts(self) -> np.ndarray:
        """Counts of the tokens in all texts, float64 [V]."""
        return torch.sparse.sum(self._counts, 0).to_dense().numpy()

    @classmethod
    def of_split(cls, split: Split, seed: int) -> TextIndex:
        """Index the texts of a split, or 100,000 drawn at random if it has more."""
        drawn = draw_samples(split, _MAX_TEXTS, np.random.default_rng(seed))
        return cls(split.samples(np.sort(drawn))[1], split.manifest.vocab_size)

    def similarity(self, text: Sequence[int]) -> float:
        """Return the similarity of `text` to the most similar text, which is 1 if they are equal.

        The similarity is 2 x common tokens in the same order / tokens of both (`difflib.SequenceMatcher`).
        """
        own = list(text)
        wanted = torch.bincount(torch.tensor(own), minlength=self._counts.shape[1])
        rows, columns = self._counts.indices()
        common = torch.zeros_like(self.lengths).index_add(
            0, rows, torch.minimum(self._counts.values(), wanted[columns].double())
        )
        # Common tokens in any order bound the similarity, so we can stop at the first bound below the best.
        bounds, order = (2 * common / (self.lengths + len(own))).sort(descending=True)
        best = 0.0
        for bound, row in zip(bounds.tolist(), order.tolist(), strict=True):
            if bound <= best:
                break
            best = max(best, SequenceMatcher(None, own, self.texts[row].tolist(), autojunk=False).ratio())
        return best
