"""`Store`: memory-mapped pairs of tokens and latents, in shards.

The cost of opening a store depends on its number of files, not on its number of samples.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.dataset import Source, Split
from mmldlm.data.manifest import LatentInfo, Manifest
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo

_FILES_PER_TASK = 2048  # of a thread that checks sizes


class Store:
    """An opened store. Opening is cheap: it checks file sizes and maps the first shard of each split.

    A store has one source folder, or several compatible ones under one manifest (see `mixture.open_mixture`).
    """

    def __init__(
        self,
        manifest: Manifest,
        sources: Sequence[Source],
        splits: Mapping[str, Split],
        reopen: Callable[[], Store],
    ):
        self.manifest, self.sources = manifest, sources
        self._splits, self._reopen = splits, reopen

    @classmethod
    def open(cls, path: Path | str, name: str = "") -> Store:
        """Open the store at `path`, of this `name` in records, by default the folder's.

        A `DataError` names the file that is missing, truncated or has another shape.
        """
        path = Path(path)
        try:
            source = Source(name or path.name, path, Manifest.read(path))
            check_sizes(source)
        except OSError as error:
            raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        store = cls.from_sources(source.manifest, [source], partial(Store.open, path, name))
        for split in store._splits.values():
            split.shards[0].check()  # a defect of all shards is reported at once
        return store

    @classmethod
    def from_sources(cls, manifest: Manifest, sources: Sequence[Source], reopen: Callable[[], Store]) -> Store:
        """Create the store of `sources`; `reopen` opens it again in another process."""
        splits = {}
        for name in manifest.splits:
            shards = [shard for source in sources for shard in source.shards(name)]
            splits[name] = Split(name, manifest, sources, shards, partial(_reopen_split, reopen, name))
        return cls(manifest, sources, splits, reopen)

    def __reduce__(self) -> tuple[Any, ...]:
        skipped = {name: split.skipped.tolist() for name, split in self._splits.items()}
        return _open_store, (self._reopen, skipped, self.manifest.latent)

    def without(self, indices: Mapping[str, Sequence[int]]) -> Store:
        """Return this store with exactly `indices` (ascending, by split) skipped, as `Split.without` does."""
        splits = {name: split.without(indices.get(name, ())) for name, split in self._splits.items()}
        return Store(self.manifest, self.sources, splits, self._reopen)

    def with_manifest(self, manifest: Manifest) -> Store:
        """Return the same samples under another manifest, such as one with other latent statistics."""
        splits = {name: split.with_manifest(manifest) for name, split in self._splits.items()}
        return Store(manifest, self.sources, splits, self._reopen)

    def split(self, name: str) -> Split:
        """Return the split `name`; DataError if there is none."""
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
        """SHA-256 of the manifest, which has the hash of each other file; of several, of identities and shares."""
        if len(self.sources) == 1:
            return self.sources[0].identity
        # The shares are part of it: they decide the sample order and the latent statistics.
        lines = (f"{source.identity} {source.share}" for source in self.sources)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """Counts of the tokens in the training split, int64 [V]; several sources are weighted by their shares."""
        if len(self.sources) == 1:
            return self.sources[0].token_counts
        samples = [source.manifest.splits["train"].samples for source in self.sources]
        # Scale each source's counts from its own number of samples to its share of all samples.
        weighted = [
            source.token_counts * (float(source.share) * sum(samples) / count)
            for source, count in zip(self.sources, samples, strict=True)
        ]
        return np.rint(np.sum(weighted, axis=0)).astype(np.int64)

    def check_files(self) -> None:
        """Check the sizes of all files; DataError names the first that is missing or has another size."""
        for source in self.sources:
            check_sizes(source)

    def standardize(self, latents: np.ndarray) -> np.ndarray:
        """Map latents [..., M, C] to unit root mean square (norm sqrt(C) on average), float32."""
        return self.manifest.latent.standardize(latents)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """Map standardized latents [..., M, C] back to the encoder's scale, float32."""
        return self.manifest.latent.restore(latents)


def check_sizes(source: Source) -> None:
    """Check the sizes of all files of a source; DataError names the first that is missing or has another size."""
    files = list(source.manifest.all_files())
    if len(files) <= _FILES_PER_TASK:
        _check_sizes(source.path, files)
        return
    with ThreadPoolExecutor(16) as pool:  # a network file system answers many requests at once
        parts = (files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK))
        list(pool.map(partial(_check_sizes, source.path), parts))


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


def _reopen_split(reopen: Callable[[], Store], name: str) -> Split:
    return reopen().split(name)


def _open_store(reopen: Callable[[], Store], skipped: dict[str, list[int]], latent: LatentInfo) -> Store:
    store = reopen()
    # The run's statistics may be those of a checkpoint, not of the store, and workers must see the same latents.
    return store.with_manifest(replace(store.manifest, latent=latent)).without(skipped)
