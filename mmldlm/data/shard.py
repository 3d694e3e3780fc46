"""`Shard`: the arrays of one shard, memory-mapped on first access, and a limit on the maps of a process."""

from __future__ import annotations

import resource
import weakref
from collections import deque
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from mmldlm.data.manifest import Manifest, ShardInfo
from mmldlm.errors import DataError

KINDS = frozenset({"tokens", "offsets", "latents", "characters"})


class Shard:
    """One shard of a store, with read-only arrays; accessing one raises DataError if its file contradicts the manifest.

    If a process would map too many arrays, the one that was mapped first is released; its next access maps it again.
    """

    def __init__(self, store: Path, info: ShardInfo, manifest: Manifest):
        self.store, self.info, self.name = store, info, info.name
        self._manifest = manifest

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

    def path(self, kind: str) -> Path:
        """Return the path of the file of an array, one of `KINDS`."""
        return self.store / f"{self.name}.{kind}.npy"

    def check(self) -> None:
        """Raise DataError if the header of a file contradicts the manifest."""
        for kind in sorted(KINDS):
            getattr(self, kind)

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Return the token counts of `rows`, by default of all, int64, or raise `DataError` if offsets are invalid."""
        # Indexing by [2, n] rows copies the starts and stops of these samples only, not all offsets.
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
        # Sizes alone do not show a file of the right length but another type or shape.
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
    """Return how many arrays may be mapped at once: half of the maps and file descriptors available to the process.

    Each mapped array costs one of both. The limit on descriptors is first raised to the maximum allowed.
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
