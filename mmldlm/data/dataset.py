"""`Split`: one split of a store, or of several that are drawn from together; looked up by row.

Shape letters: n samples, N tokens of the samples asked for, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME, LatentInfo, Manifest
from mmldlm.data.shard import Shard
from mmldlm.errors import DataError


class SplitOwner(Protocol):
    """A store, as far as a split that is unpickled in a worker needs it."""

    @property
    def manifest(self) -> Manifest: ...

    def with_manifest(self, manifest: Manifest) -> SplitOwner: ...

    def without(self, rows: Mapping[str, Sequence[int]]) -> SplitOwner: ...

    def split(self, name: str) -> Split: ...


@dataclass(frozen=True)
class Source:
    """A folder of samples: the only one, or one of several that are drawn from by their shares."""

    name: str
    path: Path
    manifest: Manifest
    share: Fraction = Fraction(1)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest, which holds the hash of every other file."""
        return hashlib.sha256((self.path / MANIFEST_NAME).read_bytes()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token occurs in the training split."""
        return np.load(self.path / "token_counts.npy", allow_pickle=False)

    def shards(self, split: str) -> list[Shard]:
        return [Shard(self.path, shard, self.manifest) for shard in self.manifest.splits[split].shards]


class Lengths:
    """Tokens of a split's samples, looked up by row in the offsets of the shards concerned."""

    def __init__(self, split: Split):
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """int32, shape of `rows` [n]. DataError where the offsets of one of them do not rise."""
        split, found = self._split, np.empty(len(rows), np.int32)
        shard_of = split.shard_of(rows)
        by_shard = np.argsort(shard_of, kind="stable")
        edges = np.flatnonzero(np.diff(shard_of[by_shard])) + 1
        for places in np.split(by_shard, edges) if len(rows) else ():
            number = int(shard_of[places[0]])
            found[places] = split.shards[number].lengths(rows[places] - split.first_row(number))
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of them: reads all offsets."""
        whole = np.concatenate([shard.lengths() for shard in self._split.shards])
        return whole.astype(dtype or np.int32)


class Split:
    """One split of a store; samples are numbered from 0 across its sources and their shards.

    `skipped`, rows in rising order, are not to be read: they keep their numbers, and count for nothing else.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        sources: Sequence[Source],
        shards: Sequence[Shard],
        reopen: Callable[[], SplitOwner],
        skipped: Sequence[int] | np.ndarray = (),
    ):
        """`shards` are those of all `sources`, in their order; `manifest` holds for all of them."""
        self.name, self.manifest, self.sources, self.shards = name, manifest, sources, shards
        self.skipped: np.ndarray = np.asarray(skipped, np.int64)
        self._reopen = reopen
        self._starts = np.cumsum([0] + [shard.info.samples for shard in shards])
        self._firsts = np.cumsum([0] + [source.manifest.splits[name].samples for source in sources])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map carries its data; workers that are spawned map the files again instead.
        return _open_split, (self._reopen, self.name, self.skipped.tolist(), self.manifest.latent)

    def without(self, rows: Sequence[int]) -> Split:
        """This split with exactly `rows` skipped. DataError where no sample of a source is left."""
        split = Split(self.name, self.manifest, self.sources, self.shards, self._reopen, rows)
        for source, first, stop in split.parts():
            samples = stop - first
            if 0 < samples == len(split.skipped_in(first, stop)):
                raise DataError(
                    f"{source.path}: all {samples} samples of split {self.name} are bad, expected good ones"
                )
        return split

    def with_manifest(self, manifest: Manifest) -> Split:
        return Split(self.name, manifest, self.sources, self.shards, self._reopen, self.skipped)

    def parts(self) -> Iterator[tuple[Source, int, int]]:
        """Each source, its first row, and the row behind its last."""
        firsts = self._firsts.tolist()
        return zip(self.sources, firsts[:-1], firsts[1:], strict=True)

    def skipped_in(self, first: int, stop: int) -> np.ndarray:
        """int64: the skipped ones of the rows [first, stop)."""
        return self.skipped[np.searchsorted(self.skipped, first) : np.searchsorted(self.skipped, stop)]

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """int64, shape of `rows`: the number of each row's source."""
        return np.searchsorted(self._firsts, rows, side="right") - 1

    def shard_of(self, rows: np.ndarray) -> np.ndarray:
        """int64, shape of `rows`: the number of each row's shard."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def by_source(self, rows: Sequence[int]) -> list[int] | dict[str, list[int]]:
        """`rows` as a record names them: of several sources, by the name of each, under its own numbers."""
        if len(self.sources) == 1:
            return list(rows)
        found: dict[str, list[int]] = {}
        for row, number in zip(rows, self.source_of(np.asarray(rows, np.int64)).tolist(), strict=True):
            found.setdefault(self.sources[number].name, []).append(row - int(self._firsts[number]))
        return found

    @property
    def lengths(self) -> Lengths:
        """Tokens of samples by row."""
        return Lengths(self)

    @property
    def mean_length(self) -> float:
        """Tokens of a sample that is drawn, on average."""
        totals = ((source.share, source.manifest.splits[self.name]) for source in self.sources)
        return float(sum(share * Fraction(total.tokens, total.samples) for share, total in totals))

    @cached_property
    def characters(self) -> np.ndarray:
        """int32 [n]: characters of every sample's text."""
        return np.concatenate([shard.characters for shard in self.shards])

    def tokens(self, index: int) -> np.ndarray:
        """int64 [L]: the tokens of one sample."""
        return self.gather(np.array([index]))[0]

    def latents(self, index: int) -> np.ndarray:
        """float32 [M, C]: the latents of one sample, on the encoder's own scale."""
        return self.gather(np.array([index]))[2][0]

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples `indices` [n] in that order: tokens int64 [N], lengths int64 [n], raw latents float32 [n, M, C].

        DataError naming shard and sample where a token is outside the vocabulary or a latent is not
        finite; IndexError where the split has no such sample.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of split {self.name}, which has {len(self)}")
        shard_of = self.shard_of(indices)
        rows = (indices - self._starts[shard_of]).tolist()
        # One by one: a micro-batch has few samples of each of many shards, and NumPy's indexing by arrays costs more
        # than a plain copy of a sample.
        shards = [self.shards[number] for number in shard_of.tolist()]
        spans = [shard.offsets[row : row + 2].tolist() for shard, row in zip(shards, rows, strict=True)]
        lengths = np.array([stop - start for start, stop in spans], np.int64)
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= self.manifest.max_length:
            _ = self.lengths[indices]  # says which
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
        if len(tokens) and int(tokens.max()) >= self.manifest.vocab_size:
            at = int(np.argmax(tokens >= self.manifest.vocab_size))
            row = int(indices[np.searchsorted(begins, at, side="right") - 1])
            raise DataError(self.unknown_token(row, int(tokens[at])))
        if not np.isfinite(latents).all():
            row = int(indices[np.argmax(~np.isfinite(latents).all(axis=(1, 2)))])
            raise DataError(self.not_finite(row))

    def first_row(self, shard: int) -> int:
        """The row of the first sample of the split's `shard`-th shard."""
        return int(self._starts[shard])

    def unknown_token(self, row: int, token: int) -> str:
        return f"{self._place(row, 'tokens')}: token {token}, expected less than vocab_size {self.manifest.vocab_size}"

    def not_finite(self, row: int) -> str:
        return f"{self._place(row, 'latents')}: the latent is not finite, expected finite numbers"

    def _place(self, row: int, kind: str) -> str:
        number, source = int(self.shard_of(np.array(row))), int(self.source_of(np.array(row)))
        sample, own = row - self.first_row(number), row - int(self._firsts[source])
        return f"{self.shards[number].path(kind)}: sample {sample} (row {own} of split {self.name})"


def _open_split(reopen: Callable[[], SplitOwner], name: str, skipped: list[int], latent: LatentInfo) -> Split:
    store = reopen()
    return store.with_manifest(replace(store.manifest, latent=latent)).without({name: skipped}).split(name)
