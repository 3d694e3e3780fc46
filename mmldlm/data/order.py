"""The order of samples, as pure functions of (seed, position): no state to save, nothing of size n to shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64-bit integers that looks random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix_array(value: np.ndarray) -> np.ndarray:
    """`_mix` of a uint64 array; array arithmetic wraps modulo 2^64 by itself."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = _mix(key ^ (part & _MASK))
    return key


def permute(index: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """int64, shape of `index`: the images of `index` under the permutation of range(n) keyed by (seed, epoch).

    A Feistel network permutes the smallest power of four that is not below n; an image outside
    range(n) is permuted again until it falls inside (cycle walking), about 4 times at most on average.
    """
    assert n > 0 and (index.size == 0 or (index.min() >= 0 and index.max() < n)), "index outside range(n)"
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [np.uint64(_key(seed, epoch, round_)) for round_ in range(_ROUNDS)]

    def network(value: np.ndarray) -> np.ndarray:
        left, right = value >> bits, value & low
        for key in keys:
            left, right = right, left ^ (_mix_array(right ^ key) & low)
        return (left << bits) | right

    images = network(index.astype(np.uint64).ravel())
    outside = np.flatnonzero(images >= n)
    while outside.size:
        images[outside] = network(images[outside])
        outside = outside[images[outside] >= n]
    return images.astype(np.int64).reshape(index.shape)


class SampleOrder:
    """The infinite stream of samples, shuffled anew every epoch, with neighbours of similar length.

    Epoch e holds each of the n samples once, permuted by (seed, e) and cut into windows of `window`
    positions. A window is sorted by length and cut into blocks of `block`, which are shuffled.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        seed: int,
        window: int = 4096,
        block: int = 64,
        skipped: Sequence[int] | np.ndarray = (),
    ):
        """`lengths` [n] are of the samples alone; `skipped`, rising, are the rows among them that are none."""
        assert len(lengths) and window >= 1 and block >= 1
        self.lengths, self.seed, self.window, self.block = lengths, seed, window, block
        self.skipped = np.asarray(skipped, np.int64)
        self._good_before = self.skipped - np.arange(len(self.skipped))  # samples before each skipped row
        self._windows = -(-len(lengths) // window)  # of one epoch; the last may be shorter
        # Steps walk through a window one global batch at a time: keep the one at hand, and its neighbour.
        self._window = lru_cache(maxsize=2)(self._sorted_window)

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self.lengths)

    def __reduce__(self) -> tuple[type, tuple[np.ndarray, int, int, int, np.ndarray]]:
        return SampleOrder, (self.lengths, self.seed, self.window, self.block, self.skipped)

    def take(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the rows of the samples at stream positions [start, start + count)."""
        assert start >= 0 and count >= 0
        parts = []
        position, stop = start, start + count
        while position < stop:
            epoch, within = divmod(position, len(self.lengths))
            number, offset = divmod(within, self.window)
            part = self._window(epoch, number)[offset : offset + stop - position]
            parts.append(part)
            position += len(part)
        samples = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return samples + np.searchsorted(self._good_before, samples, side="right")

    def _sorted_window(self, epoch: int, number: int) -> np.ndarray:
        n = len(self.lengths)
        positions = np.arange(number * self.window, min((number + 1) * self.window, n))
        samples = permute(positions, n, self.seed, epoch)
        samples = samples[np.argsort(self.lengths[samples], kind="stable")]
        blocks = -(-len(samples) // self.block)
        shuffled = permute(np.arange(blocks), blocks, self.seed, -1 - (epoch * self._windows + number))
        return np.concatenate([samples[b * self.block : (b + 1) * self.block] for b in shuffled])
