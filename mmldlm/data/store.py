"""`Store`: memory-mapped pairs of tokens and latents, in splits of shards.

The cost of opening a store depends on its number of files, not on its number of samples. An index numbers the samples
of a split, across its sources and shards, and a row numbers the samples of one shard.
Shape letters: n samples, N tokens of n samples, M latent tokens of a sample, C latent channels, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import resource
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME, LatentInfo, Manifest, ShardInfo
from mmldlm.errors import ConfigError, DataError
from mmldlm.utils.files import FileInfo
from mmldlm.utils.short_repr import short_repr

_FILES_PER_TASK = 2048  # of a thread that checks sizes


class Shard:
    """One shard of a store. Accessing one of its read-only arrays maps the file.

    If a process would map too many arrays, the oldest map is released, and the next access maps the file again. It is a
    `DataError` if the file of an accessed array contradicts the manifest.
    """

    def __init__(self, folder: Path, info: ShardInfo, manifest: Manifest):
        self.folder, self.info, self._manifest = folder, info, manifest

    @cached_property
    def tokens(self) -> np.ndarray:
        """Token ids of all samples, concatenated, [tokens of the shard]."""
        return self._map("tokens", self._manifest.token_dtype, (self.info.tokens,))

    @cached_property
    def offsets(self) -> np.ndarray:
        """Start of each sample in `tokens`, and the end of the last, int64 [samples + 1]."""
        offsets = self._map("offsets", "int64", (self.info.samples + 1,))
        first, last = int(offsets[0]), int(offsets[-1])
        if (first, last) != (0, self.info.tokens):
            path = self.path("offsets")
            raise DataError(f"{path}: offsets run from {first} to {last}, expected 0 to {self.info.tokens}")
        return offsets

    @cached_property
    def latents(self) -> np.ndarray:
        """Latents on the encoder's scale, [samples, M, C]."""
        latent = self._manifest.latent
        return self._map("latents", self._manifest.latent_dtype, (self.info.samples, latent.tokens, latent.channels))

    @cached_property
    def characters(self) -> np.ndarray:
        """Characters of each sample's text, int32 [samples]."""
        return self._map("characters", "int32", (self.info.samples,))

    @cached_property
    def weights(self) -> np.ndarray:
        """Weights of all samples as given, float32 [samples], if the store has any."""
        return self._map("weights", "float32", (self.info.samples,))

    def path(self, kind: str) -> Path:
        """Return the path of the file of an array."""
        return self.folder / f"{self.info.name}.{kind}.npy"

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the token counts of `rows` (by default all), int64, or raise `DataError` if offsets are invalid."""
        # Indexing by [2, n] rows copies only the starts and stops of these samples, not all offsets.
        starts, stops = (self.offsets[:-1], self.offsets[1:]) if rows is None else self.offsets[[rows, rows + 1]]
        lengths = stops - starts
        invalid = (lengths < 1) | (lengths > self._manifest.max_length) | (starts < 0) | (stops > self.info.tokens)
        if invalid.any():
            first = int(np.argmax(invalid))
            raise DataError(
                f"{self.path('offsets')}: sample {first if rows is None else rows[first]} has {lengths[first]} tokens "
                f"from {starts[first]} on, expected 1 to {self._manifest.max_length} among {self.info.tokens}"
            )
        return lengths

    def _map(self, kind: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self.path(kind)
        try:
            # A plain view of the map: every indexing of np.memmap costs a Python call.
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable array ({error})") from None
        # A file of the right size may still have another type or shape.
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
        _mapped.append((weakref.ref(self), kind))
        while len(_mapped) > max_mapped_arrays():
            reference, oldest_kind = _mapped.popleft()
            if (shard := reference()) is not None:
                vars(shard).pop(oldest_kind, None)  # clears the cached property
        return array


_mapped: deque[tuple[weakref.ref[Shard], str]] = deque()  # by this process, oldest first


@cache
def max_mapped_arrays() -> int:
    """Return how many arrays may be mapped at once: half of the maps and file descriptors that the process may have.

    Each mapped array costs one map and one descriptor. We first raise the limit on descriptors to its maximum.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        maps = 65_530  # Linux's default
    limit = maps if hard == resource.RLIM_INFINITY else min(maps, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit // 2


@dataclass(frozen=True)
class Source:
    """One store folder: the only folder of a `Store`, or the folder of `share` of a mixture's samples."""

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


class Split:
    """One split of a store, with samples indexed from 0 across its sources and their shards.

    Samples in `skipped` (ascending indices, int64) keep their indices but are never drawn.
    """

    def __init__(self, store: Store, name: str, skipped: Sequence[int]):
        self._store, self.name = store, name
        self.manifest, self.sources = store.manifest, store.sources
        self.shards = [
            Shard(source.path, shard, store.manifest)
            for source in store.sources
            for shard in source.manifest.splits[name].shards
        ]
        self.skipped: np.ndarray = np.asarray(skipped, np.int64)
        # Index of the first sample of each shard and of each source, and the number of all samples.
        self.shard_starts = np.cumsum([0] + [shard.info.samples for shard in self.shards])
        self.source_starts = np.cumsum([0] + [source.manifest.splits[name].samples for source in self.sources])
        for source, first, stop in self.source_ranges():
            # A source without samples could never give its share.
            if 0 < stop - first == len(self.skipped_in(first, stop)):
                raise DataError(
                    f"{source.path}: all {stop - first} samples of split {name} are bad, expected good ones"
                )

    def __len__(self) -> int:
        return int(self.shard_starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled memory map carries its data. Spawned workers map the files again instead.
        return Store.split, (self._store, self.name)

    def source_ranges(self) -> Iterator[tuple[Source, int, int]]:
        """Yield (source, first index, last index + 1) of each source."""
        starts = self.source_starts.tolist()
        return zip(self.sources, starts[:-1], starts[1:], strict=True)

    def skipped_in(self, first: int, stop: int) -> np.ndarray:
        """Return the skipped indices in [first, stop), int64."""
        return self.skipped[np.searchsorted(self.skipped, first) : np.searchsorted(self.skipped, stop)]

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the position in `sources` of each sample's source, int64 in the shape of `indices`."""
        return np.searchsorted(self.source_starts, indices, side="right") - 1

    def shard_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the position in `shards` of each sample's shard, int64 in the shape of `indices`."""
        return np.searchsorted(self.shard_starts, indices, side="right") - 1

    def group_by_source(self, indices: Sequence[int]) -> list[int] | dict[str, list[int]]:
        """Return `indices` as records show them: with several sources, by the name of the source, indices within it."""
        if len(self.sources) == 1:
            return list(indices)
        by_source: dict[str, list[int]] = {}
        for source, index_in_source in map(self._place, indices):
            by_source.setdefault(source.name, []).append(index_in_source)
        return by_source

    def _place(self, index: int) -> tuple[Source, int]:
        """Return the source of a sample, and its index within it."""
        source = int(self.source_of(np.array(index)))
        return self.sources[source], index - int(self.source_starts[source])

    def sample_name(self, index: int) -> str:
        """Return the name STORE:INDEX of a sample, by the index within its store."""
        source, index_in_source = self._place(index)
        return f"{source.name}:{index_in_source}"

    def index_of(self, name: str) -> int:
        """Return the index of the sample STORE:INDEX, or raise `ConfigError` if there is none."""
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
        """Return concatenated tokens int64 [N], lengths int64 [n] and latents float32 [n, M, C] of `indices` [n].

        Latents are on the encoder's scale.

        Raises:
            DataError: A token is outside the vocabulary, or a latent is not finite. It names shard and sample.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of split {self.name}, which has {len(self)}")
        shard_of = self.shard_of(indices)
        rows = (indices - self.shard_starts[shard_of]).tolist()
        # Copy sample by sample: a micro-batch has few samples of each of many shards, and NumPy's indexing by arrays
        # would cost more than plain copies.
        shards = [self.shards[shard] for shard in shard_of.tolist()]
        spans = [shard.offsets[row : row + 2].tolist() for shard, row in zip(shards, rows, strict=True)]
        lengths = np.array([stop - start for start, stop in spans], np.int64)
        # A damaged length could allocate any amount of memory below.
        if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= self.manifest.max_length:
            _ = self.lengths[indices]  # raises, naming the sample
        ends = np.cumsum(lengths)
        begins = ends - lengths
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
        latents = np.empty((len(indices), self.manifest.latent.tokens, self.manifest.latent.channels), np.float32)
        for sample, (shard, row, (start, stop)) in enumerate(zip(shards, rows, spans, strict=True)):
            tokens[begins[sample] : ends[sample]] = shard.tokens[start:stop]
            latents[sample] = shard.latents[row]
        # One pass in the usual case. Only if there is a bad sample do we search for it. Stored tokens are unsigned.
        if len(tokens) and int(tokens.max()) >= self.manifest.vocab_size:
            position = int(np.argmax(tokens >= self.manifest.vocab_size))
            index = int(indices[np.searchsorted(begins, position, side="right") - 1])
            raise DataError(self.unknown_token_message(index, int(tokens[position])))
        if not np.isfinite(latents).all():
            index = int(indices[np.argmax(~np.isfinite(latents).all(axis=(1, 2)))])
            raise DataError(self.nonfinite_message(index))
        return tokens, lengths, latents

    def weights(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the weights of samples `indices` [n] in training, or None if no source has any.

        They are float32 [n], divided by their mean over the source's training samples.
        """
        means = [source.manifest.mean_weight for source in self.sources]
        if not any(means):
            return None
        shards, sources = self.shard_of(indices), self.source_of(indices)
        places = zip(shards.tolist(), (indices - self.shard_starts[shards]).tolist(), sources.tolist(), strict=True)
        return np.array(
            [self.shards[s].weights[r] / mean if (mean := means[of]) else 1 for s, r, of in places], np.float32
        )

    def samples(self, indices: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return prefixes (each with the token that ends it), texts, and latents of `indices` [n]. See `gather`."""
        tokens, lengths, latents = self.gather(indices)
        parts = np.split(tokens, lengths.cumsum()[:-1])
        cuts = [np.split(part, np.flatnonzero(part == self.manifest.pad_id)[:1] + 1) for part in parts]
        return [cut[0] if len(cut) > 1 else cut[0][:0] for cut in cuts], [cut[-1] for cut in cuts], latents

    def unknown_token_message(self, index: int, token: int) -> str:
        """Return the error message for a token of sample `index` that is outside the vocabulary."""
        where = self._describe(index, "tokens")
        return f"{where}: token {token}, expected less than vocab_size {self.manifest.vocab_size}"

    def nonfinite_message(self, index: int) -> str:
        """Return the error message for a non-finite latent of sample `index`."""
        return f"{self._describe(index, 'latents')}: the latent is not finite, expected finite numbers"

    def _describe(self, index: int, kind: str) -> str:
        shard = int(self.shard_of(np.array(index)))
        row = index - self.shard_starts[shard]
        return f"{self.shards[shard].path(kind)}: sample {row} (row {self._place(index)[1]} of split {self.name})"


class SampleLengths:
    """Token counts of a split's samples, looked up by index in the offsets of the shards."""

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
            lengths[positions] = split.shards[shard].lengths(indices[positions] - split.shard_starts[shard])
        return lengths

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the lengths of all samples, for which all offsets are read."""
        lengths = np.concatenate([shard.lengths() for shard in self._split.shards])
        return lengths.astype(dtype or np.int32)


class Store:
    """An opened store: one source folder, or several compatible ones under one manifest (`mixture.open_data`)."""

    def __init__(
        self,
        manifest: Manifest,
        sources: Sequence[Source],
        reopen: Callable[[], Store],
        skipped: Mapping[str, Sequence[int]] | None = None,
    ):
        """Create the store of `sources` without opening a file. `reopen` opens it again in another process."""
        self.manifest, self.sources = manifest, sources
        self._reopen, self._skipped = reopen, dict(skipped or {})
        self._splits = {name: Split(self, name, self._skipped.get(name, ())) for name in manifest.splits}

    @classmethod
    def open(cls, path: Path | str, name: str = "") -> Store:
        """Open the store at `path`. Records call it `name`, by default the name of the folder.

        This is cheap: it checks file sizes and maps the first shard of each split. It is a `DataError` if a file is
        missing, truncated or has another shape.
        """
        path = Path(path)
        try:
            source = Source(name or path.name, path, Manifest.read(path))
            store = cls(source.manifest, [source], partial(cls.open, path, name))
            store.check_files()
        except OSError as error:
            raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        for split in store._splits.values():
            for suffix in sorted(split.shards[0].info.files):
                getattr(split.shards[0], suffix.removesuffix(".npy"))  # a defect that all shards share shows up now
        return store

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self._reopen, self._skipped, self.manifest.latent)

    def without(self, skipped: Mapping[str, Sequence[int]]) -> Store:
        """Return this store with exactly these samples (ascending indices, by split) skipped.

        It is a `DataError` if a source has no samples left.
        """
        return Store(self.manifest, self.sources, self._reopen, skipped)

    def with_manifest(self, manifest: Manifest) -> Store:
        """Return the same samples under another manifest, for example with other latent statistics."""
        return Store(manifest, self.sources, self._reopen, self._skipped)

    def split(self, name: str) -> Split:
        """Return the split `name`, or raise `DataError` if there is none."""
        if not self._splits:
            raise DataError(f"{self.path}: has no samples; expected a complete data store, such as with --data")
        if name not in self._splits:
            raise DataError(f"{self.path}: no split {name!r}, expected one of {', '.join(self._splits)}")
        return self._splits[name]

    @property
    def path(self) -> Path:
        """The folder of the first source, whose tokenizer and encoder all sources share."""
        return self.sources[0].path

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest, which has the hash of every other file, or of all sources' identities and shares."""
        if len(self.sources) == 1:
            return self.sources[0].identity
        # The shares decide the sample order and the latent statistics, so they are part of the identity.
        lines = (f"{source.identity} {source.share}" for source in self.sources)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Counts of the tokens in the training split, int64 [V], with several sources weighted by their shares."""
        samples = [source.manifest.splits["train"].samples for source in self.sources]
        # Scale each source's counts from its own number of samples to its share of all samples.
        weighted = [
            source.token_counts * (float(source.share) * sum(samples) / count)
            for source, count in zip(self.sources, samples, strict=True)
        ]
        return np.rint(np.sum(weighted, axis=0)).astype(np.int64)

    def check_files(self) -> None:
        """Check the sizes of all files, and raise `DataError` for the first that is missing or has another size."""
        with ThreadPoolExecutor(16) as pool:  # a network file system answers many requests at once
            for source in self.sources:
                files = list(source.manifest.all_files())
                parts = (files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK))
                list(pool.map(partial(_check_sizes, source.path), parts))

    def standardize(self, latents: np.ndarray) -> np.ndarray:
        """Map latents [..., M, C] to unit root mean square (norm sqrt(C) on average), float32."""
        return self.manifest.latent.standardize(latents)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """Map standardized latents [..., M, C] back to the encoder's scale, float32."""
        return self.manifest.latent.restore(latents)


def _open_again(reopen: Callable[[], Store], skipped: dict[str, Sequence[int]], latent: LatentInfo) -> Store:
    store = reopen()
    # The run may use latent statistics of a checkpoint instead of the store's, and workers must see the same latents.
    return Store(replace(store.manifest, latent=latent), store.sources, reopen, skipped)


def _check_sizes(folder: Path, files: Sequence[tuple[str, FileInfo]]) -> None:
    prefix = f"{folder}/"
    for name, info in files:
        try:
            status = os.stat(f"{prefix}{name}")  # noqa: PTH116  creating a Path per file takes longer than the call
        except (FileNotFoundError, NotADirectoryError):
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            raise DataError(f"{folder / name}: missing, expected a file of {info.bytes} bytes")
        if status.st_size != info.bytes:
            raise DataError(f"{folder / name}: damaged: {status.st_size} bytes, expected {info.bytes}")
