"""Sample order as pure functions of (seed, position): no state to save, and no array of the size of the data set.

`SampleOrder` shuffles one store, `MixedOrder` draws from several. A position counts the samples drawn since the start
of the run, and an index numbers the samples of a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from mmldlm.data.store import SampleLengths, Split

_MASK = (1 << 64) - 1
_ROUNDS = 6  # of the Feistel network


def _mix(value: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014): a bijection of uint64 that looks random, and wraps."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _key(*parts: int) -> np.ndarray:
    """Return a key, uint64 [1], that depends on all `parts` and their order."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = _mix(key ^ np.uint64(part & _MASK))
    return key


def permute(index: np.ndarray, n: int, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """Apply the permutation of range(n) that belongs to (seed, epoch) to `index`, integers of any shape.

    A Feistel network permutes range(m), where m is the smallest power of four that is not below n. An image outside
    range(n) is permuted again until it falls inside (cycle walking), at most about 4 times on average. Each index may
    have its own epoch. Images are int64.
    """
    assert n > 0 and (index.size == 0 or (index.min() >= 0 and index.max() < n)), "index outside range(n)"
    # Half of the bits of the domain, which has 4^half >= n values.
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    epoch_key = _mix(_key(seed) ^ np.asarray(epoch, np.int64).astype(np.uint64).ravel())
    keys = [
        _mix(epoch_key ^ np.uint64(round_)) for round_ in range(_ROUNDS)
    ]  # of each round: one for all, or one per index

    def network(value: np.ndarray, keys: Sequence[np.ndarray]) -> np.ndarray:
        left, right = value >> bits, value & low
        # A Feistel round is invertible whatever function we mix in, so the network is a permutation.
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        return (left << bits) | right

    images = network(index.astype(np.uint64).ravel(), keys)
    outside = np.flatnonzero(images >= n)
    while outside.size:
        # Ends for every index: following a permutation from a value in range(n) leads back into range(n).
        images[outside] = network(images[outside], [key[outside] if len(key) > 1 else key for key in keys])
        outside = outside[images[outside] >= n]
    return images.astype(np.int64).reshape(index.shape)


@dataclass(frozen=True)
class StoreSamples:
    """The samples of one store: indices [first, first + count) except `skipped`."""

    first: int
    count: int
    skipped: np.ndarray  # int64, ascending, relative to `first`
    share: Fraction = Fraction(1)  # of the stream. The shares of all stores in a mixture sum to 1
    key: int = 0  # distinguishes the permutations of a store in a mixture

    def __len__(self) -> int:
        return self.count - len(self.skipped)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices of kept samples, given their `numbers`, which count only kept samples from 0."""
        # A number moves up by the skipped samples that come before it.
        kept_before_skipped = self.skipped - np.arange(len(self.skipped))
        return self.first + numbers + np.searchsorted(kept_before_skipped, numbers, side="right")


class _WindowedOrder:
    """An infinite stream of sample indices whose neighbors have similar lengths.

    The stream consists of windows. We sort a window's samples by length, cut them into blocks of `block` samples and
    shuffle the blocks. Subclasses define which samples a window holds and where it begins in the stream.
    """

    def __init__(self, lengths: np.ndarray | SampleLengths, seed: int, window: int, block: int):
        assert len(lengths) and window >= 1 and block >= 1
        self.lengths, self.seed, self.window, self.block = lengths, seed, window, block
        # Steps read a window one global batch at a time: cache the current window and its neighbor.
        self._window = lru_cache(maxsize=2)(self._sorted_window)

    def take(self, start: int, count: int) -> np.ndarray:
        """Return the indices of the samples at stream positions [start, start + count), int64 [count]."""
        return self.take_with_lengths(start, count)[0]

    def take_with_lengths(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the same indices as `take`, and the lengths of these samples, both [count]."""
        assert start >= 0 and count >= 0
        indices, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        position, stop = start, start + count
        while position < stop:
            number, offset = self._locate(position)
            window_indices, window_lengths = self._window(number)
            indices.append(window_indices[offset : offset + stop - position])
            lengths.append(window_lengths[offset : offset + stop - position])
            position += len(indices[-1])
        return np.concatenate(indices), np.concatenate(lengths)

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the number of the window that contains `position`, and the offset in it."""
        raise NotImplementedError

    def _window_indices(self, number: int) -> np.ndarray:
        """Return the indices of a window's samples, int64, in the order that samples of equal length keep."""
        raise NotImplementedError

    def _sorted_window(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        indices = self._window_indices(number)
        lengths = self.lengths[indices]
        by_length = np.argsort(lengths, kind="stable")
        blocks = -(-len(indices) // self.block)
        # Epochs are not negative, so the blocks' keys (-1, -2, ...) never coincide with the samples' keys.
        shuffled = permute(np.arange(blocks), blocks, self.seed, -1 - number)
        order = np.concatenate([by_length[b * self.block : (b + 1) * self.block] for b in shuffled])
        return indices[order], lengths[order]


class SampleOrder(_WindowedOrder):
    """Order of the samples of one store except `skipped` ones (ascending indices), reshuffled every epoch.

    Epoch e contains each of the n samples once, permuted by (seed, e) and cut into windows of `window` positions.
    """

    def __init__(
        self,
        lengths: np.ndarray | SampleLengths,
        seed: int,
        window: int = 4096,
        block: int = 64,
        skipped: Sequence[int] | np.ndarray = (),
    ):
        super().__init__(lengths, seed, window, block)
        self._samples = StoreSamples(0, len(lengths), np.asarray(skipped, np.int64))
        self._windows = -(-len(self) // window)  # per epoch, the last perhaps shorter

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return len(self._samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleOrder, (self.lengths, self.seed, self.window, self.block, self._samples.skipped)

    def epochs(self, position: int) -> list[float]:
        """Return how many epochs of each store (here there is one) were drawn before `position`."""
        return [position / len(self)]

    def _locate(self, position: int) -> tuple[int, int]:
        # No window spans two epochs, so that each epoch contains every sample once.
        epoch, within = divmod(position, len(self))
        number, offset = divmod(within, self.window)
        return epoch * self._windows + number, offset

    def _window_indices(self, number: int) -> np.ndarray:
        epoch, within = divmod(number, self._windows)
        positions = np.arange(within * self.window, min((within + 1) * self.window, len(self)))
        return self._samples.indices(permute(positions, len(self), self.seed, epoch))


def count_draws(position: int, shares: Sequence[Fraction]) -> list[int]:
    """Return how many of the first `position` samples of a stream come from each part, by descending shares.

    The first part gets its share of the samples, rounded. The second gets its share of the remaining samples, and so
    on. No count decreases as the position grows. With two or three parts no count is off its share by a whole sample,
    and with K parts none is off by more than (1 + H) / 2, where H is the sum of 1 / j for j < K: each rounding error,
    at most 1/2, reaches part k in proportion to its share of the remainder, and the remainder behind part j contained
    k - j parts at least as large.
    """
    counts, samples_left, share_left = [], position, Fraction(1)
    for share in shares:
        conditional = share / share_left if share_left != share else Fraction(1)
        numerator, denominator = conditional.numerator, conditional.denominator
        # Integer arithmetic: rounds half up, exactly, at any position.
        counts.append((2 * numerator * samples_left + denominator) // (2 * denominator))
        samples_left, share_left = samples_left - counts[-1], share_left - share
    return counts


class MixedOrder(_WindowedOrder):
    """Order of the samples of several stores, each with its share of every window.

    Each store is read epoch by epoch in its own permutations, and the mixture itself has no epochs. Before a window is
    sorted, the samples of each store are spaced evenly among the others, and samples of equal length stay so
    afterwards. `parts` are in descending order of their shares.
    """

    def __init__(
        self,
        lengths: np.ndarray | SampleLengths,
        seed: int,
        parts: Sequence[StoreSamples],
        window: int = 4096,
        block: int = 64,
    ):
        super().__init__(lengths, seed, window, block)
        self.parts = parts
        self._shares = [part.share for part in parts]
        assert sum(self._shares) == 1 and self._shares == sorted(self._shares, reverse=True)
        assert min(map(len, parts)) > 0

    def __len__(self) -> int:
        """Return the number of samples of all stores."""
        return sum(map(len, self.parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedOrder, (self.lengths, self.seed, self.parts, self.window, self.block)

    def epochs(self, position: int) -> list[float]:
        """Return how many epochs of each store were drawn before `position`."""
        counts = count_draws(position, self._shares)
        return [count / len(part) for count, part in zip(counts, self.parts, strict=True)]

    def _locate(self, position: int) -> tuple[int, int]:
        return divmod(position, self.window)

    def _window_indices(self, number: int) -> np.ndarray:
        # The draws of each part before and after the window: no state is carried from window to window.
        starts, stops = (count_draws(edge * self.window, self._shares) for edge in (number, number + 1))
        indices, fractions = [], []
        for part, start, stop in zip(self.parts, starts, stops, strict=True):
            # A small store may begin several epochs in one window, each with its own permutation.
            epochs, within = np.divmod(np.arange(start, stop), len(part))
            seed = int(_key(self.seed, part.key)[0])
            indices.append(part.indices(permute(within, len(part), seed, epochs)))
            # Midpoints of equal intervals of the window, so that sorting them spaces each store evenly.
            fractions.append((np.arange(stop - start) + 0.5) / (stop - start))
        return np.concatenate(indices)[np.argsort(np.concatenate(fractions), kind="stable")]


def make_sample_order(split: Split, seed: int, window: int) -> SampleOrder | MixedOrder:
    """Return the sample order of a run on a split."""
    if len(split.sources) == 1:
        return SampleOrder(split.lengths, seed, window, skipped=split.skipped)
    parts = [
        StoreSamples(
            first=first,
            count=stop - first,
            skipped=split.skipped_in(first, stop) - first,
            share=source.share,
            # From the content of the store: neither its path nor its place in the mixture changes its permutations.
            key=int(source.identity[:16], 16),
        )
        for source, first, stop in split.source_ranges()
    ]
    return MixedOrder(split.lengths, seed, parts, window)
