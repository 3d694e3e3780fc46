"""The formulas behind the metrics, in NumPy alone: of arrays and of lists of tokens, knowing no model and no data.

Shape letters: n documents or texts, M latent tokens, C latent channels, d features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

BITS = 1 / math.log(2)
Z95 = NormalDist().inv_cdf(0.975)
LEVELS = 10  # equal parts of [0, 1] that noise times are counted in


class Ratio(NamedTuple):
    """A ratio of sums over documents, with its 95 % confidence interval."""

    value: float
    standard_error: float
    interval: tuple[float, float]

    def __mul__(self, factor: float) -> Ratio:  # type: ignore[override]
        low, high = self.interval
        return Ratio(self.value * factor, self.standard_error * factor, (low * factor, high * factor))


def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Ratio:
    """sum(numerators) / sum(denominators) of n documents drawn at random; a mean where the latter are 1.

    The standard error is that of the linearised ratio (Cochran, Sampling Techniques, 3rd edition, section 2.11):
    with residuals r = numerators - ratio denominators, std(r) / (mean(denominators) sqrt(n)). The interval is
    normal: ratio +- 1.96 standard errors, for 30 documents or more. NaN of a single document.
    """
    value = float(numerators.sum() / denominators.sum())
    residuals = numerators - value * denominators
    spread = float(residuals.std(ddof=1)) if len(residuals) > 1 else math.nan
    error = spread / float(denominators.mean()) / math.sqrt(len(residuals))
    return Ratio(value, error, (value - Z95 * error, value + Z95 * error))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n] cosines of the rows of [n, M, C], mean over M; NaN where a row is not finite."""
    norm = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    return ((a * b).sum(-1) / np.maximum(norm, 1e-12)).mean(-1)


def ranks_of_own(similarity: np.ndarray) -> np.ndarray:
    """int64 [n]: where each row finds its own column of `similarity` [n, n] among all; 1 is the best.

    Candidates as good as the true one count before it: duplicates are no success, and NaN is none either.
    """
    return (~(similarity < similarity.diagonal()[:, None])).sum(1)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, ties at their mean rank. NaN where one is constant."""
    if min(np.ptp(a), np.ptp(b)) == 0:
        return math.nan
    return float(np.corrcoef(_mean_ranks(a), _mean_ranks(b))[0, 1])


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return (sizes.cumsum() - (sizes - 1) / 2)[group]


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of two normal distributions with the means and covariances of [n, d] and [m, d].

    |mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)) (Dowson and Landau, 1982, J. Multivariate Analysis 12:450; of
    images' features: arXiv 1706.08500, eq. 6). The trace of the root is that of (A^(1/2) B A^(1/2))^(1/2), which is
    symmetric: no complex roots. Below d + 1 samples a covariance has no full rank, and the distance no meaning.
    """
    assert min(len(a), len(b)) > a.shape[1], f"{len(a)} and {len(b)} samples of {a.shape[1]} features"
    a, b = a.astype(np.float64), b.astype(np.float64)
    one, two = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (a, b))
    values, vectors = np.linalg.eigh(one)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    shared = np.sqrt(np.linalg.eigvalsh(root @ two @ root).clip(0)).sum()
    return float(np.square(a.mean(0) - b.mean(0)).sum() + np.trace(one) + np.trace(two) - 2 * shared)


# --- of texts, as lists of tokens -----------------------------------------------------------------------------


def token_entropy(texts: Sequence[Sequence[int]]) -> float:
    """Entropy in bits of a text's own token frequencies, mean over texts (arXiv 2409.02908)."""
    return float(np.mean([_entropy(text) for text in texts]))


def _entropy(text: Sequence[int]) -> float:
    shares = np.array(list(Counter(text).values())) / len(text)
    return float(-(shares * np.log2(shares)).sum())


def distinct(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """Share of different ones among the n-grams of all texts (distinct-n, arXiv 1510.03055); None without any."""
    found = list(chain.from_iterable(_grams(text, n) for text in texts))
    return len(set(found)) / len(found) if found else None


def repetition(texts: Sequence[Sequence[int]], n: int) -> float | None:
    """Share of a text's n-grams that it has before, mean over texts (seq-rep-n, arXiv 1908.04319).

    None where no text has n tokens.
    """
    shares = [1 - len(set(grams)) / len(grams) for text in texts if (grams := list(_grams(text, n)))]
    return float(np.mean(shares)) if shares else None


def _grams(text: Sequence[int], n: int) -> Iterator[tuple[int, ...]]:
    return zip(*(text[start:] for start in range(n)), strict=False)


# --- tables ---------------------------------------------------------------------------------------------------


def length_buckets(lengths: np.ndarray) -> list[tuple[int, int]]:
    """First and last length of each bucket that has a document: 1 to 8, 9 to 16, 17 to 32 and so on."""
    lasts = [8]
    while lasts[-1] < lengths.max():
        lasts.append(2 * lasts[-1])
    firsts = [1, *(last + 1 for last in lasts)]
    buckets = zip(firsts, lasts, strict=False)
    return [(first, last) for first, last in buckets if ((lengths >= first) & (lengths <= last)).any()]


def noise_levels(t: np.ndarray) -> Iterator[tuple[dict[str, float | int], np.ndarray]]:
    """Of draws at noise times `t`, by level: `t_from`, `t_to` and how many `draws`; and which these are, as bool."""
    level = np.minimum((t * LEVELS).astype(np.int64), LEVELS - 1)
    for number in range(LEVELS):
        inside = level == number
        yield {"t_from": number / LEVELS, "t_to": (number + 1) / LEVELS, "draws": int(inside.sum())}, inside
