"""`Split`: the samples of one split of a store or of a mixture of stores, looked up by index.

An index numbers the samples of a split, across its sources and shards; a row numbers the samples of one shard.
Shape letters: n samples, N tokens of n samples, M latent tokens of a sample, C latent channels, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME, LatentInfo, Manifest
from mmldlm.data.shard import Shard
from mmldlm.errors import ConfigError, DataError
from mmldlm.utils.short_repr import short_repr


@dataclass(frozen=True)
class Source:
    """One store folder: the only one of a `Store`, or one that contributes `share` of the samples of a mixture."""

    name: str
    path: Path
    manifest: Manifest
    share: Fraction = Fraction(1)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest, which contains the hash of every other file."""
        return hashlib.sha256((self.path / MANIFEST_NAME).read_bytes()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Counts of the tokens in the training split, int64 [V]."""
        return np.load(self.path / "token_counts.npy", allow_pickle=False)

    def shards(self, split: str) -> list[Shard]:
        """Return the shards of `split`, in order; no file is opened yet."""
        return [Shard(self.path, shard, self.manifest) for shard in self.manifest.splits[split].shards]


class SampleLengths:
    """Token counts of a split's samples, looked up by index in the offsets of the shards concerned."""

    def __init__(self, split: Split):
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """Return the lengths of samples `indices` [n], int32 [n], or raise `DataError` if their offsets are invalid."""
        split, lengths = self._split, np.empty(len(indices), np.int32)
        shard_of = split.shard_of(indices)
        # Group the positions in `indices` by shard, so that each shard's offsets are indexed once.
        by_shard = np.argsort(shard_of, kind="stable")
        edges = np.flatnonzero(np.diff(shard_of[by_shard])) + 1
        # np.split of an empty array yields one empty part, which has no shard.
        for positions in np.split(by_shard, edges) if len(indices) else ():
            shard = int(shard_of[positions[0]])
            lengths[positions] = split.shards[shard].lengths(indices[positions] - split.first_index(shard))
        return lengths

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the lengths of all samples; reads all offsets."""
        lengths = np.concatenate([shard.lengths() for shard in self._split.shards])
        return lengths.astype(dtype or np.int32)


class Split:
    """One split of a store, with samples indexed from 0 across its sources and their shards.

    Samples in `skipped` (ascending indices) keep their indices but are never drawn.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        sources: Sequence[Source],
        shards: Sequence[Shard],
        reopen: Callable[[], Split],
        skipped: Sequence[int] | np.ndarray = (),
    ):
        """Create a split of the shards of all `sources`, in the order of their indices.

        Args:
            manifest: Describes all sources together.
            reopen: Opens the split again in another process.
            skipped: Ascending indices of samples to leave out.
        """
        self.name, self.manifest, self.sources, self.shards = name, manifest, sources, shards
        self.skipped: np.ndarray = np.asarray(skipped, np.int64)
        self._reopen = reopen
        self._shard_starts = np.cumsum([0] + [shard.info.samples for shard in shards])
        self._source_starts = np.cumsum([0] + [source.manifest.splits[name].samples for source in sources])

    def __len__(self) -> int:
        return int(self._shard_starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map carries its data; workers that are spawned map the files again instead.
        return _open_split, (self._reopen, self.skipped.tolist(), self.manifest.latent)

    def without(self, indices: Sequence[int]) -> Split:
        """Return this split with exactly `indices` (ascending) skipped; a source left empty is a `DataError`."""
        # The shards, and so their maps, are shared with this split.
        split = Split(self.name, self.manifest, self.sources, self.shards, self._reopen, indices)
        # A source without samples could never give its share.
        for source, first, stop in split.source_ranges():
            samples = stop - first
            if 0 < samples == len(split.skipped_in(first, stop)):
                raise DataError(
                    f"{source.path}: all {samples} samples of split {self.name} are bad, expected good ones"
                )
        return split

    def with_manifest(self, manifest: Manifest) -> Split:
        """Return this split under another manifest."""
        return Split(self.name, manifest, self.sources, self.shards, self._reopen, self.skipped)

    def source_ranges(self) -> Iterator[tuple[Source, int, int]]:
        """Yield (source, first index, index after the last) of each source."""
        starts = self._source_starts.tolist()
        return zip(self.sources, starts[:-1], starts[1:], strict=True)

    def skipped_in(self, first: int, stop: int) -> np.ndarray:
        """Return the skipped indices in [first, stop), int64."""
        return self.skipped[np.searchsorted(self.skipped, first) : np.searchsorted(self.skipped, stop)]

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the position in `sources` of each sample's source, int64 in the shape of `indices`."""
        return np.searchsorted(self._source_starts, indices, side="right") - 1

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the position in `shards` of each sample's shard, int64 in the shape of `indices`."""
        return np.searchsorted(self._shard_starts, indices, side="right") - 1

    def group_by_source(self, indices: Sequence[int]) -> list[int] | dict[str, list[int]]:
        """Return `indices` as records name them: of several sources, by name, the indices within that source."""
        if len(self.sources) == 1:
            return list(indices)
        by_source: dict[str, list[int]] = {}
        for index, source in zip(indices, self.source_of(np.asarray(indices, np.int64)).tolist(), strict=True):
            by_source.setdefault(self.sources[source].name, []).append(index - int(self._source_starts[source]))
        return by_source

    def sample_name(self, index: int) -> str:
        """Return the name STORE:INDEX of a sample, by the index within its store."""
        source = int(self.source_of(np.array(index)))
        return f"{self.sources[source].name}:{index - int(self._source_starts[source])}"

    def index_of(self, name: str) -> int:
        """Return the index of the sample STORE:INDEX; ConfigError if there is none."""
        store, _, number = name.rpartition(":")
        for source, first, stop in self.source_ranges():
            if source.name == store and number.isdecimal() and int(number) < stop - first:
                return first + int(number)
        sizes = ", ".join(f"{source.name}:0 to {stop - first - 1}" for source, first, stop in self.source_ranges())
        raise ConfigError(f"samples of split {self.name} are {sizes}; found {short_repr(name)}")

    @property
    def lengths(self) -> SampleLengths:
        """Token counts of samples by index."""
        return SampleLengths(self)

    @property
    def mean_length(self) -> float:
        """Mean number of tokens of a drawn sample, sources weighted by their shares."""
        totals = ((source.share, source.manifest.splits[self.name]) for source in self.sources)
        return float(sum(share * Fraction(total.tokens, total.samples) for share, total in totals))

    @cached_property
    def characters(self) -> np.ndarray:
        """Characters of every sample's text, int32 [n]."""
        return np.concatenate([shard.characters for shard in self.shards])

    def tokens(self, index: int) -> np.ndarray:
        """Return the tokens of one sample, int64 [length]."""
        return self.gather(np.array([index]))[0]

    def latents(self, index: int) -> np.ndarray:
        """Return the latents of one sample on the encoder's scale, float32 [M, C]."""
        return self.gather(np.array([index]))[2][0]

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the samples `indices` [n], in that order.

        Returns:
            Concatenated tokens int64 [N], lengths int64 [n], and latents on the encoder's scale float32 [n, M, C].

        Raises:
            DataError: A token is outside the vocabulary or a latent is not finite; names shard and sample.
            IndexError: The split has no such sample.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of split {self.name}, which has {len(self)}")
        shard_of = self.shard_of(indices)
        rows = (indices - self._shard_starts[shard_of]).tolist()
        # Sample by sample: a micro-batch has few samples of each of many shards, for which NumPy's indexing by arrays
        # costs more than a plain copy.
        shards = [self.shards[shard] for shard in shard_of.tolist()]
        spans = [shard.offsets[row : row + 2].tolist() for shard, row in zip(shards, rows, strict=True)]
        lengths = np.array([stop - start for start, stop in spans], np.int64)
        # A damaged length could allocate without bound below, before any error.
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= self.manifest.max_length:
            _ = self.lengths[indices]  # raises, naming the sample
        ends = np.cumsum(lengths)
        begins = ends - lengths
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
        latents = np.empty((len(indices), self.manifest.latent.tokens, self.manifest.latent.channels), np.float32)
        begin = 0
        for sample, (shard, row, (start, stop)) in enumerate(zip(shards, rows, spans, strict=True)):
            end = begin + stop - start
            tokens[begin:end] = shard.tokens[start:stop]
            latents[sample] = shard.latents[row]
            begin = end
        self._check(indices, tokens, begins, latents)
        return tokens, lengths, latents

    def _check(self, indices: np.ndarray, tokens: np.ndarray, begins: np.ndarray, latents: np.ndarray) -> None:
        # One pass in the usual case; the sample is searched for only if there is a bad one. Stored tokens are unsigned.
        if len(tokens) and int(tokens.max()) >= self.manifest.vocab_size:
            position = int(np.argmax(tokens >= self.manifest.vocab_size))
            index = int(indices[np.searchsorted(begins, position, side="right") - 1])
            raise DataError(self.unknown_token_message(index, int(tokens[position])))
        if not np.isfinite(latents).all():
            index = int(indices[np.argmax(~np.isfinite(latents).all(axis=(1, 2)))])
            raise DataError(self.nonfinite_message(index))

    def first_index(self, shard: int) -> int:
        """Return the index of the first sample of the split's `shard`-th shard."""
        return int(self._shard_starts[shard])

    def unknown_token_message(self, index: int, token: int) -> str:
        """Return the error message for a token of sample `index` that is outside the vocabulary."""
        where = self._describe(index, "tokens")
        return f"{where}: token {token}, expected less than vocab_size {self.manifest.vocab_size}"

    def nonfinite_message(self, index: int) -> str:
        """Return the error message for a non-finite latent of sample `index`."""
        return f"{self._describe(index, 'latents')}: the latent is not finite, expected finite numbers"

    def _describe(self, index: int, kind: str) -> str:
        shard, source = int(self.shard_of(np.array(index))), int(self.source_of(np.array(index)))
        row, index_in_source = index - self.first_index(shard), index - int(self._source_starts[source])
        return f"{self.shards[shard].path(kind)}: sample {row} (row {index_in_source} of split {self.name})"


def _open_split(reopen: Callable[[], Split], skipped: list[int], latent: LatentInfo) -> Split:
    split = reopen()
    return split.with_manifest(replace(split.manifest, latent=latent)).without(skipped)
