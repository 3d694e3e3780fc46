"""`Store`: memory-mapped pairs of tokens and latents, and `Split`: one of its splits.

Shape letters: n samples, N tokens of the samples asked for, M latent tokens of a sample, C latent channels.
A store is written by `mmldlm.data.writer.StoreWriter`, exported here for convenience.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME, LatentInfo, Manifest, ShardInfo
from mmldlm.data.writer import StoreWriter
from mmldlm.errors import DataError

__all__ = ["Manifest", "Split", "Store", "StoreWriter"]


class Shard(NamedTuple):
    """The arrays of one shard, mapped read-only."""

    name: str
    tokens: np.ndarray  # [tokens of the shard]
    offsets: np.ndarray  # int64 [samples + 1]
    latents: np.ndarray  # [samples, M, C]
    characters: np.ndarray  # int32 [samples]


class Split:
    """One split of a store; samples are numbered from 0 across its shards.

    `skipped`, rows in rising order, are not to be read: they keep their numbers, and count for nothing else.
    """

    def __init__(self, store: Path, name: str, manifest: Manifest, shards: list[Shard], skipped: Sequence[int] = ()):
        self.store, self.name, self.manifest, self.shards = store, name, manifest, shards
        self.skipped: np.ndarray = np.asarray(skipped, np.int64)
        self._starts = np.cumsum([0] + [len(shard.offsets) - 1 for shard in shards])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map carries its data; workers that are spawned map the files again instead.
        return _open_split, (self.store, self.name, self.skipped.tolist())

    def without(self, rows: Sequence[int]) -> Split:
        """This split with exactly `rows` skipped. DataError where no sample is left."""
        if 0 < len(self) <= len(rows):
            raise DataError(f"{self.store}: all {len(self)} samples of split {self.name} are bad, expected good ones")
        return Split(self.store, self.name, self.manifest, self.shards, rows)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [n]: tokens of every sample. DataError where the offsets of a shard do not rise."""
        lengths = [np.diff(shard.offsets) for shard in self.shards]
        for shard, found in zip(self.shards, lengths, strict=True):
            if (found < 1).any():
                sample = int(np.argmax(found < 1))
                path = self.store / f"{shard.name}.offsets.npy"
                raise DataError(f"{path}: sample {sample} has {found[sample]} tokens, expected at least 1")
        return np.concatenate(lengths).astype(np.int32)

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
        shard_of = np.searchsorted(self._starts, indices, side="right") - 1
        rows = indices - self._starts[shard_of]
        lengths = self.lengths[indices].astype(np.int64)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
        latents = np.empty((len(indices), self.manifest.latent.tokens, self.manifest.latent.channels), np.float32)
        # One by one: a micro-batch has few samples of each of many shards, and NumPy's indexing by arrays costs more
        # than a plain copy of a sample.
        places = zip(shard_of.tolist(), rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for sample, (number, row, begin, end) in enumerate(places):
            shard = self.shards[number]
            source = int(shard.offsets[row])
            tokens[begin:end] = shard.tokens[source : source + end - begin]
            latents[sample] = shard.latents[row]
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
        shard = int(np.searchsorted(self._starts, row, side="right")) - 1
        path = self.store / f"{self.shards[shard].name}.{kind}.npy"
        return f"{path}: sample {row - int(self._starts[shard])} (row {row} of split {self.name})"


class Store:
    """An opened store. Opening is cheap: it checks sizes and headers and maps the shards."""

    def __init__(self, path: Path, manifest: Manifest, splits: dict[str, Split]):
        self.path, self.manifest = path, manifest
        self._splits = splits

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Open the store at `path`. DataError naming the file that is missing, truncated or of another shape."""
        path = Path(path)
        try:
            manifest = Manifest.read(path)
            check_sizes(path, manifest)
        except OSError as error:
            raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        splits = {
            name: Split(path, name, manifest, [_open_shard(path, shard, manifest) for shard in split.shards])
            for name, split in manifest.splits.items()
        }
        return cls(path, manifest, splits)

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_store, (self.path, {name: split.skipped.tolist() for name, split in self._splits.items()})

    def without(self, rows: Mapping[str, Sequence[int]]) -> Store:
        """The same store with these rows of its splits skipped. DataError where no sample of a split is left."""
        splits = {name: split.without(rows.get(name, ())) for name, split in self._splits.items()}
        return Store(self.path, self.manifest, splits)

    def split(self, name: str) -> Split:
        if name not in self._splits:
            raise DataError(f"{self.path}: no split {name!r}, expected one of {', '.join(self._splits)}")
        return self._splits[name]

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest, which holds the hash of every other file."""
        return hashlib.sha256((self.path / MANIFEST_NAME).read_bytes()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token occurs in the training split."""
        return np.load(self.path / "token_counts.npy", allow_pickle=False)

    def standardise(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: from the encoder's scale to unit root mean square (norm sqrt(C) on average)."""
        return self.manifest.latent.standardise(latents)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: the inverse of `standardise`."""
        return self.manifest.latent.restore(latents)


def check_sizes(store: Path, manifest: Manifest) -> None:
    """DataError naming the first file that is missing or of another size than was written."""
    for name, info in manifest.all_files():
        path = store / name
        if not path.is_file():
            raise DataError(f"{path}: missing, expected a file of {info.bytes} bytes")
        if path.stat().st_size != info.bytes:
            raise DataError(f"{path}: damaged: {path.stat().st_size} bytes, expected {info.bytes}")


def _open_shard(store: Path, shard: ShardInfo, manifest: Manifest) -> Shard:
    latent: LatentInfo = manifest.latent
    shapes = {
        "tokens": (manifest.token_dtype, (shard.tokens,)),
        "offsets": ("int64", (shard.samples + 1,)),
        "latents": (manifest.latent_dtype, (shard.samples, latent.tokens, latent.channels)),
        "characters": ("int32", (shard.samples,)),
    }
    arrays = {}
    for kind, (dtype, shape) in shapes.items():
        path = store / f"{shard.name}.{kind}.npy"
        try:
            # A plain view of the map: indexing np.memmap itself costs a Python call each time.
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable array ({error})") from None
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
        arrays[kind] = array
    first, last = int(arrays["offsets"][0]), int(arrays["offsets"][-1])
    if (first, last) != (0, shard.tokens):
        path = store / f"{shard.name}.offsets.npy"
        raise DataError(f"{path}: offsets run from {first} to {last}, expected 0 to {shard.tokens}")
    return Shard(shard.name, **arrays)


def _open_store(path: Path, skipped: dict[str, list[int]]) -> Store:
    return Store.open(path).without(skipped)


def _open_split(store: Path, name: str, skipped: list[int]) -> Split:
    return Store.open(store).split(name).without(skipped)
