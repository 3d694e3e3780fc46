"""How the samples of an optimizer step are dealt to ranks and micro-batches; it changes no curve.

Shape letters: S steps, G samples of a global batch, W ranks, R = G / W rounds in which each rank is dealt a sample, B
samples of a micro-batch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mmldlm.data.batch_schedule import BatchSize


def deal(lengths: np.ndarray, size: BatchSize, world_size: int, latent_tokens: int) -> list[np.ndarray]:
    """Return the slots of all ranks' samples in each micro-batch of a step.

    Samples sorted by length are dealt in rounds, each round in the opposite direction of the round before ("snake"
    order), so that no rank always gets the longest. Consecutive rounds form a micro-batch. So all ranks have equally
    many micro-batches, and in each of them equally many samples and nearly equally many tokens.

    Args:
        lengths: Tokens of the samples by slot, int [G].
        size: Batch sizes of the step; G is a multiple of `world_size`.
        latent_tokens: Latent tokens of a sample, which count for the token budget like those of the text.

    Returns:
        Slots of each micro-batch, int64 [B, W].
    """
    rounds = np.argsort(lengths, kind="stable").reshape(-1, world_size)
    rounds[1::2] = rounds[1::2, ::-1]
    if not size.micro_batch_tokens:
        return list(rounds.reshape(-1, size.micro_batch_size, world_size))
    edges = _fill(lengths[rounds] + latent_tokens, size.micro_batch_tokens, size.micro_batch_size)
    return [rounds[start:stop] for start, stop in pairwise(edges)]


def largest_micro_batches(tokens: np.ndarray, size: BatchSize, world_size: int) -> np.ndarray:
    """Return the tokens of the largest micro-batch of any rank in each of S steps, int64 [S], as `deal` makes them.

    `tokens` are the text and latent tokens of the steps' samples, int64 [S, G].
    """
    rounds = np.sort(tokens, axis=1).reshape(len(tokens), -1, world_size)
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    if not size.micro_batch_tokens:
        by_micro_batch = rounds.reshape(len(tokens), -1, size.micro_batch_size, world_size).sum(axis=2)
        return by_micro_batch.max(axis=(1, 2))
    largest = rounds.sum(axis=1).max(axis=1)
    # Steps of more than one micro-batch.
    for step in np.flatnonzero((largest > size.micro_batch_tokens) | (rounds.shape[1] > size.micro_batch_size)):
        edges = _fill(rounds[step], size.micro_batch_tokens, size.micro_batch_size)
        largest[step] = np.add.reduceat(rounds[step], edges[:-1]).max()
    return largest


def largest_possible(longest: int, size: BatchSize) -> int:
    """Return the tokens of the largest micro-batch that there can be, of samples of at most `longest` tokens."""
    if size.micro_batch_tokens:
        return max(longest, min(size.micro_batch_tokens, size.micro_batch_size * longest))
    return size.micro_batch_size * longest


def _fill(tokens: np.ndarray, budget: int, max_rounds: int) -> list[int]:
    """Return the edges of as few micro-batches as hold all rounds, each within the budget on every rank.

    A round that exceeds the budget is alone in its micro-batch. Otherwise they are about equally large, if the budget
    permits. `tokens` are text and latent tokens of each rank's sample in each round, int [R, W].
    """
    ends = np.concatenate([np.zeros_like(tokens[:1], np.int64), tokens.cumsum(axis=0, dtype=np.int64)])
    edges = [0]
    while edges[-1] < len(tokens):
        start = edges[-1]
        sums = (ends[start + 1 : start + 1 + max_rounds] - ends[start]).max(axis=1)
        edges.append(start + max(1, int(np.searchsorted(sums, budget, side="right"))))
    # As many micro-batches of equal shares, since the last of those would often be small.
    total, count = ends.sum(axis=1), len(edges) - 1
    shares = total[-1] * np.arange(1, count) // count
    even = np.array([0, *np.searchsorted((total[:-1] + total[1:]) // 2, shares), len(tokens)])
    fits = np.diff(ends[even], axis=0).max() <= budget and np.diff(even).max() <= max_rounds
    return even.tolist() if fits else edges
