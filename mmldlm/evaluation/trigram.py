"""A trigram model of the training split's tokens: what a text costs without a network, and a judge of generated texts.

Shape letters: n texts, N trigrams of the texts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ORDER = 3  # tokens of the longest n-gram


class TrigramModel:
    """A distribution of texts, each with its end, by interpolated Kneser-Ney smoothing.

    p(w | u v) = max(c(u v w) - D, 0) / c(u v) + D types(u v) / c(u v) p(w | v), and so on down to 1 / (V + 1), where
    types counts the different tokens after u v. c counts trigrams in the texts, and a shorter n-gram by the different
    tokens before it (Kneser and Ney, ICASSP 1995; interpolated as in Chen and Goodman, 1999, Computer Speech and
    Language 13:359). D = n1 / (n1 + 2 n2), for n1 n-grams that count 1 and n2 that count 2 (Ney, Essen and Kneser,
    1994, Computer Speech and Language 8:1). We add 1/2 to each, so that D is defined and below 1 for few texts.
    """

    def __init__(self, texts: Sequence[Sequence[int] | np.ndarray], vocab_size: int):
        self._base = vocab_size + 1
        self._orders: list[tuple[np.ndarray, ...]] = []
        assert self._base**ORDER < 2**63, f"{vocab_size} tokens"
        keys = self._keys(texts)
        for order in range(ORDER, 0, -1):
            keys, counts = np.unique(keys, return_counts=True)
            ones, twos = ((counts == number).sum() + 0.5 for number in (1, 2))
            discount = ones / (ones + 2 * twos)
            contexts, first, types = np.unique(keys // self._base, return_index=True, return_counts=True)
            totals = np.add.reduceat(counts, first)
            self._orders.append((keys, (counts - discount)[:, None], contexts, np.stack([totals, discount * types], 1)))
            keys = keys % self._base ** (order - 1)  # without the first token, once for each different one

    def nats(self, texts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Return the nats of each text with its end, float64 [n]."""
        keys = self._keys(texts)
        p = np.full(len(keys), 1 / self._base)
        for order, (known, counts, contexts, of_contexts) in enumerate(reversed(self._orders), 1):
            wanted = keys % self._base**order
            count = _look_up(known, counts, wanted)[:, 0]
            total, left = _look_up(contexts, of_contexts, wanted // self._base).T
            p = np.where(total > 0, (count + left * p) / np.maximum(total, 1), p)
        lengths = np.array([len(text) + 1 for text in texts])
        return -np.add.reduceat(np.log(p), lengths.cumsum() - lengths)

    def _keys(self, texts: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Return a number for each trigram, int64 [N]. Two ends stand before a text, and one behind it."""
        end, base = self._base - 1, self._base
        padded = [np.array([end, end, *text, end], np.int64) for text in texts]
        return np.concatenate([(text[:-2] * base + text[1:-1]) * base + text[2:] for text in padded])


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the rows of `values` at the sorted `keys` that are `wanted`, and zeros for those that are not there."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where((keys[places] == wanted)[:, None], values[places], 0)
