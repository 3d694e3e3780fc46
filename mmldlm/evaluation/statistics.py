"""The formulas behind the metrics, in NumPy only: functions of arrays and token lists, without model or data.

Shape letters: n documents or texts, M latent tokens, C latent channels, d features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from mmldlm.utils.intervals import Ratio

BITS = 1 / math.log(2)  # per nat
NUM_NOISE_BINS = 10  # noise times are grouped into this many equal parts of [0, 1]


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of latents [n, M, C], averaged over M, as [n]. NaN if a latent is not finite."""
    norm = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / np.maximum(norm, 1e-12)).mean(-1)


def retrieval_ranks(similarity: np.ndarray) -> np.ndarray:
    """Return the rank of the diagonal element in each row of `similarity` [n, n], int64 [n]. 1 is the best.

    A candidate that is as good as the true one ranks before it, so neither duplicates nor NaN count as success.
    """
    return (~(similarity < similarity.diagonal()[:, None])).sum(1)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation: Pearson's for the ranks, with mean ranks for ties. NaN if an input is constant."""
    if min(np.ptp(a), np.ptp(b)) == 0:
        return math.nan
    return float(np.corrcoef(_mean_ranks(a), _mean_ranks(b))[0, 1])


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    # Equal values share the mean of the ranks cumsum - size + 1 to cumsum.
    return (sizes.cumsum() - (sizes - 1) / 2)[group]


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared Frechet distance of the normal distributions fitted to samples [n, d] and [m, d].

    |mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)), where A and B are the covariances (Dowson and Landau, 1982, J.
    Multivariate Analysis 12:450, and for features of images arXiv 1706.08500, eq. 6). The trace of the root equals the
    trace of (A^(1/2) B A^(1/2))^(1/2), which is symmetric, so there are no complex roots. With fewer than d + 1
    samples, a covariance does not have full rank, and the distance has no meaning.
    """
    assert min(len(a), len(b)) > a.shape[1], f"{len(a)} and {len(b)} samples of {a.shape[1]} features"
    a, b = a.astype(np.float64), b.astype(np.float64)
    cov_a, cov_b = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (a, b))
    values, vectors = np.linalg.eigh(cov_a)
    # Here and below, rounding may leave a covariance with eigenvalues slightly below 0.
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    trace_root = np.sqrt(np.linalg.eigvalsh(root @ cov_b @ root).clip(0)).sum()
    return float(np.square(a.mean(0) - b.mean(0)).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * trace_root)


# --- texts, as lists of tokens --------------------------------------------------------------------------------


def token_entropy(texts: Sequence[Sequence[int]]) -> float:
    """Return the entropy (bits) of the token frequencies in a text, averaged over texts (arXiv 2409.02908)."""
    frequencies = [np.array(list(Counter(text).values())) / len(text) for text in texts]
    return float(np.mean([float(-(share * np.log2(share)).sum()) for share in frequencies]))


def distinct(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """Return the fraction of distinct n-grams among the n-grams of all texts (distinct-n, arXiv 1510.03055).

    None if no text has n tokens.
    """
    grams = list(chain.from_iterable(_ngrams(text, n) for text in texts))
    return len(set(grams)) / len(grams) if grams else None


def repetition(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """Return the fraction of a text's n-grams that repeat an earlier one, averaged over texts.

    This is seq-rep-n (arXiv 1908.04319). None if no text has n tokens.
    """
    fractions = [1 - len(set(grams)) / len(grams) for text in texts if (grams := list(_ngrams(text, n)))]
    return float(np.mean(fractions)) if fractions else None


def _ngrams(text: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    return zip(*(text[start:] for start in range(n)), strict=False)


def with_interval(name: str, ratio: Ratio) -> dict[str, Any]:
    """Return a metric and its interval, which gets the suffix `_ci95`."""
    return {name: ratio.value, f"{name}_ci95": list(ratio.interval)}


def share_with_interval(name: str, hits: np.ndarray) -> dict[str, Any]:
    """Return the share of true `hits`, and its interval as `_ci95` (Wilson, 1927, J. Amer. Stat. Assoc. 22:209).

    Unlike a normal interval, it has a width at shares of 0 and 1.
    """
    z, successes, count = 1.959964, int(hits.sum()), len(hits)
    center, spread = (successes + z**2 / 2) / (count + z**2), successes * (count - successes) / count + z**2 / 4
    half = z * math.sqrt(spread) / (count + z**2)
    return {name: successes / count, f"{name}_ci95": [max(0.0, center - half), min(1.0, center + half)]}


# --- tables ---------------------------------------------------------------------------------------------------


def length_buckets(lengths: np.ndarray) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield each bucket's `tokens_from` and `tokens_to` (1 to 8, 9 to 16, 17 to 32 ...) and a mask of its texts.

    Empty buckets are left out.
    """
    first, last = 1, 8
    while first <= lengths.max():
        inside = (lengths >= first) & (lengths <= last)
        if inside.any():
            yield {"tokens_from": first, "tokens_to": last}, inside
        first, last = last + 1, 2 * last


def noise_bins(t: np.ndarray) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield each noise bin's `t_from`, `t_to` and number of `draws`, and a bool mask of its draws among `t`."""
    # t = 1 belongs to the last bin.
    bins = np.minimum((t * NUM_NOISE_BINS).astype(np.int64), NUM_NOISE_BINS - 1)
    for index in range(NUM_NOISE_BINS):
        inside = bins == index
        bounds = {"t_from": index / NUM_NOISE_BINS, "t_to": (index + 1) / NUM_NOISE_BINS}
        yield {**bounds, "draws": int(inside.sum())}, inside
