"""The order of samples, as pure functions of (seed, position): no state to save, nothing of size n to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): a bijection of 64-bit integers that looks random."""
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


def permute(index: np.ndarray, n: int, seed: int, epoch: int | np.ndarray) -> np.ndarray:
    """int64, shape of `index`: the images of `index` under the permutation of range(n) keyed by (seed, epoch).

    Each index may have an epoch of its own. A Feistel network permutes the smallest power of four that is not below n;
    an image outside range(n) is permuted again until it falls inside (cycle walking), about 4 times at most on average.
    """
    assert n > 0 and (index.size == 0 or (index.min() >= 0 and index.max() < n)), "index outside range(n)"
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    keys: list[Any]  # of each round: one, or one for each index
    if isinstance(epoch, np.ndarray):
        of_epoch = _mix_array(epoch.astype(np.uint64).ravel() ^ np.uint64(_key(seed)))
        keys = [_mix_array(of_epoch ^ np.uint64(round_)) for round_ in range(_ROUNDS)]
    else:
        keys = [np.uint64(_key(seed, epoch, round_)) for round_ in range(_ROUNDS)]

    def network(value: np.ndarray, keys: Sequence[Any]) -> np.ndarray:
        left, right = value >> bits, value & low
        for key in keys:
            left, right = right, left ^ (_mix_array(right ^ key) & low)
        return (left << bits) | right

    images = network(index.astype(np.uint64).ravel(), keys)
    outside = np.flatnonzero(images >= n)
    while outside.size:
        images[outside] = network(images[outside], [key[outside] if key.ndim else key for key in keys])
        outside = outside[images[outside] >= n]
    return images.astype(np.int64).reshape(index.shape)


class Lengths(Protocol):
    """Tokens of samples by row: an array, or what looks them up where they lie."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: np.ndarray, /) -> np.ndarray: ...


class _Windows:
    """An infinite stream of samples with neighbors of similar length, in windows.

    A window is sorted by length and cut into blocks of `block`, which are shuffled. Which samples are in it, and where
    it lies in the stream, is for the order to say.
    """

    def __init__(self, lengths: Lengths, seed: int, window: int, block: int):
        assert len(lengths) and window >= 1 and block >= 1
        self.lengths, self.seed, self.window, self.block = lengths, seed, window, block
        # Steps walk through a window one global batch at a time: keep the one at hand, and its neighbor.
        self._window = lru_cache(maxsize=2)(self._sorted_window)

    def take(self, start: int, count: int) -> np.ndarray:
        """int64 [count]: the rows of the samples at stream positions [start, start + count)."""
        return self.take_sized(start, count)[0]

    def take_sized(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`take`, and the lengths of those samples: [count] both."""
        assert start >= 0 and count >= 0
        rows, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        position, stop = start, start + count
        while position < stop:
            number, offset = self._place(position)
            window = self._window(number)
            rows.append(window[0][offset : offset + stop - position])
            lengths.append(window[1][offset : offset + stop - position])
            position += len(rows[-1])
        return np.concatenate(rows), np.concatenate(lengths)

    def _place(self, position: int) -> tuple[int, int]:
        """The number of the window that a position lies in, and its place in there."""
        raise NotImplementedError

    def _drawn(self, number: int) -> np.ndarray:
        """int64: the rows of a window's samples. Those of equal lengths stay in this order."""
        raise NotImplementedError

    def _sorted_window(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._drawn(number)
        lengths = self.lengths[rows]
        by_length = np.argsort(lengths, kind="stable")
        blocks = -(-len(rows) // self.block)
        shuffled = permute(np.arange(blocks), blocks, self.seed, -1 - number)
        chosen = np.concatenate([by_length[b * self.block : (b + 1) * self.block] for b in shuffled])
        return rows[chosen], lengths[chosen]


class SampleOrder(_Windows):
    """The order of one store, shuffled anew every epoch.

    Epoch e holds each of the n samples once, permuted by (seed, e) and cut into windows of `window` positions.
    """

    def __init__(
        self,
        lengths: Lengths,
        seed: int,
        window: int = 4096,
        block: int = 64,
        skipped: Sequence[int] | np.ndarray = (),
    ):
        """`lengths` are of all rows; `skipped`, rising, are the rows that are no samples."""
        super().__init__(lengths, seed, window, block)
        self._samples = _Samples(0, len(lengths), np.asarray(skipped, np.int64))
        self._windows = -(-len(self) // window)  # of one epoch; the last may be shorter

    def __len__(self) -> int:
        """Samples of an epoch."""
        return len(self._samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleOrder, (self.lengths, self.seed, self.window, self.block, self._samples.skipped)

    def epochs(self, position: int) -> list[float]:
        """How often the samples before `position` are all that there are; of each store, here of one."""
        return [position / len(self)]

    def _place(self, position: int) -> tuple[int, int]:
        epoch, within = divmod(position, len(self))
        number, offset = divmod(within, self.window)
        return epoch * self._windows + number, offset

    def _drawn(self, number: int) -> np.ndarray:
        epoch, within = divmod(number, self._windows)
        positions = np.arange(within * self.window, min((within + 1) * self.window, len(self)))
        return self._samples.rows(permute(positions, len(self), self.seed, epoch))


class _Samples:
    """The samples among the rows [first, first + count): all but `skipped`, which are numbered from the first."""

    def __init__(self, first: int, count: int, skipped: np.ndarray):
        self.first, self.count, self.skipped = first, count, skipped
        self._good_before = skipped - np.arange(len(skipped))  # samples before each skipped row

    def __len__(self) -> int:
        return self.count - len(self.skipped)

    def rows(self, samples: np.ndarray) -> np.ndarray:
        """The rows of the samples of these numbers."""
        return self.first + samples + np.searchsorted(self._good_before, samples, side="right")


@dataclass(frozen=True)
class Part:
    """What an order of several stores draws from one of them: its rows [first, first + count) but `skipped`."""

    first: int
    count: int
    skipped: np.ndarray  # int64, rising, numbered from `first`
    share: Fraction  # of the stream; those of all parts sum to 1
    key: int  # of its own permutations


def drawn_before(position: int, shares: Sequence[Fraction]) -> list[int]:
    """How many of the first `position` samples of a stream each part has, where shares are given in falling order.

    The first part has its share, rounded; the second its share of what is left, and so on. None ever loses a sample as
    the position rises. Two or three parts are never a whole sample away from their shares, and K parts never more than
    (1 + H) / 2, H being the sum of 1 / j for j < K: each rounding, of 1/2 at most, reaches part k by its share of what
    was left, and what was left behind part j held k - j parts at least as large.
    """
    counts, left, rest = [], position, Fraction(1)
    for share in shares:
        conditional = share / rest if rest != share else Fraction(1)
        above, below = conditional.numerator, conditional.denominator
        counts.append((2 * above * left + below) // (2 * below))
        left, rest = left - counts[-1], rest - share
    return counts


class MixedOrder(_Windows):
    """The order of several stores, each with its share of every window.

    Each store is walked epoch by epoch, in its own permutations; an epoch of all does not exist. A window's samples of
    one store lie evenly among the others before it is sorted, and so do those of equal lengths afterwards.
    """

    def __init__(self, lengths: Lengths, seed: int, parts: Sequence[Part], window: int = 4096, block: int = 64):
        """`parts` in falling order of their shares."""
        super().__init__(lengths, seed, window, block)
        self.parts = parts
        self._shares = [part.share for part in parts]
        self._samples = [_Samples(part.first, part.count, part.skipped) for part in parts]
        assert sum(self._shares) == 1 and self._shares == sorted(self._shares, reverse=True)
        assert min(map(len, self._samples)) > 0

    def __len__(self) -> int:
        """Samples of all stores."""
        return sum(map(len, self._samples))

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedOrder, (self.lengths, self.seed, self.parts, self.window, self.block)

    def epochs(self, position: int) -> list[float]:
        """How often the samples before `position` are all that there are, of each store."""
        drawn = drawn_before(position, self._shares)
        return [count / len(samples) for count, samples in zip(drawn, self._samples, strict=True)]

    def _place(self, position: int) -> tuple[int, int]:
        return divmod(position, self.window)

    def _drawn(self, number: int) -> np.ndarray:
        edges = (drawn_before(place * self.window, self._shares) for place in (number, number + 1))
        rows, places = [], []
        for part, samples, start, stop in zip(self.parts, self._samples, *edges, strict=True):
            epochs, within = np.divmod(np.arange(start, stop), len(samples))
            rows.append(samples.rows(permute(within, len(samples), _key(self.seed, part.key), epochs)))
            places.append((np.arange(stop - start) + 0.5) / (stop - start))
        return np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")]
