"""`Store`: memory-mapped pairs of tokens and latents, in shards.

Opening costs what the manifest says, not what the store holds: nothing grows with the number of samples.
A store is written by `mmldlm.data.store_writer.StoreWriter`, exported here for convenience, as `Split` is.
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
from mmldlm.data.store_writer import StoreWriter
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo

__all__ = ["Manifest", "Source", "Split", "Store", "StoreWriter"]

_AT_ONCE = 2048  # files that one thread looks at before it takes others


class Store:
    """An opened store. Opening is cheap: it checks sizes, and maps the first shard of each split.

    One folder; or several that `mixture.open_mixture` has found to fit together, under one manifest.
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
        """Open the store at `path`, called `name`.

        DataError naming the file that is missing, truncated or of another shape.
        """
        path = Path(path)
        try:
            source = Source(name or path.name, path, Manifest.read(path))
            check_sizes(source)
        except OSError as error:
            raise DataError(f"{error.filename or path}: cannot be read: {error.strerror}") from None
        store = cls.of(source.manifest, [source], partial(Store.open, path, name))
        for split in store._splits.values():
            split.shards[0].check()  # what is wrong in all of them is said at once
        return store

    @classmethod
    def of(cls, manifest: Manifest, sources: Sequence[Source], reopen: Callable[[], Store]) -> Store:
        """The store of `sources`, which `reopen` opens again in another process."""
        splits = {
            name: Split(name, manifest, sources, [shard for each in sources for shard in each.shards(name)], reopen)
            for name in manifest.splits
        }
        return cls(manifest, sources, splits, reopen)

    def __reduce__(self) -> tuple[Any, ...]:
        skipped = {name: split.skipped.tolist() for name, split in self._splits.items()}
        return _open_store, (self._reopen, skipped, self.manifest.latent)

    def without(self, rows: Mapping[str, Sequence[int]]) -> Store:
        """The same store with these rows of its splits skipped. DataError where no sample of a source is left."""
        splits = {name: split.without(rows.get(name, ())) for name, split in self._splits.items()}
        return Store(self.manifest, self.sources, splits, self._reopen)

    def with_manifest(self, manifest: Manifest) -> Store:
        """The same samples under another manifest, as one that standardizes their latents otherwise."""
        splits = {name: split.with_manifest(manifest) for name, split in self._splits.items()}
        return Store(manifest, self.sources, splits, self._reopen)

    def split(self, name: str) -> Split:
        if name not in self._splits:
            raise DataError(f"{self.path}: no split {name!r}, expected one of {', '.join(self._splits)}")
        return self._splits[name]

    @property
    def path(self) -> Path:
        """The folder; of several the first, whose tokenizer and encoder are those of all."""
        return self.sources[0].path

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the manifest, which holds the hash of every other file; of several, of theirs and their shares."""
        if len(self.sources) == 1:
            return self.sources[0].identity
        return hashlib.sha256("\n".join(f"{each.identity} {each.share}" for each in self.sources).encode()).hexdigest()

    @cached_property
    def token_counts(self) -> np.ndarray:
        """int64 [V]: how often each token occurs in the training split; of several sources, drawn by their shares."""
        if len(self.sources) == 1:
            return self.sources[0].token_counts
        samples = [source.manifest.splits["train"].samples for source in self.sources]
        parts = zip(self.sources, samples, strict=True)
        drawn = [source.token_counts * (float(source.share) * sum(samples) / own) for source, own in parts]
        return np.rint(np.sum(drawn, axis=0)).astype(np.int64)

    def check_files(self) -> None:
        """DataError naming the first file that is missing or of another size than was written."""
        for source in self.sources:
            check_sizes(source)

    def standardize(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: from the encoder's scale to unit root mean square (norm sqrt(C) on average)."""
        return self.manifest.latent.standardize(latents)

    def restore(self, latents: np.ndarray) -> np.ndarray:
        """float32 [..., M, C]: the inverse of `standardize`."""
        return self.manifest.latent.restore(latents)


def check_sizes(source: Source) -> None:
    """DataError naming the first file that is missing or of another size than was written."""
    files = list(source.manifest.all_files())
    if len(files) <= _AT_ONCE:
        _check_sizes(source.path, files)
        return
    with ThreadPoolExecutor(16) as pool:  # a file system on the network answers many at once
        parts = (files[start : start + _AT_ONCE] for start in range(0, len(files), _AT_ONCE))
        list(pool.map(partial(_check_sizes, source.path), parts))


def _check_sizes(folder: Path, files: Sequence[tuple[str, FileInfo]]) -> None:
    prefix = f"{folder}/"
    for name, info in files:
        try:
            found = os.stat(f"{prefix}{name}")  # noqa: PTH116  a Path for each of many files takes longer than this
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            raise DataError(f"{folder / name}: missing, expected a file of {info.bytes} bytes")
        if found.st_size != info.bytes:
            raise DataError(f"{folder / name}: damaged: {found.st_size} bytes, expected {info.bytes}")


def _open_store(reopen: Callable[[], Store], skipped: dict[str, list[int]], latent: LatentInfo) -> Store:
    store = reopen()
    return store.with_manifest(replace(store.manifest, latent=latent)).without(skipped)
