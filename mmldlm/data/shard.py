"""`Shard`: the arrays of one shard, each mapped when it is first asked for, and how many a process maps at once."""

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
    """One shard of a store. Its arrays are read-only; DataError where a file is not what the manifest says.

    The longest mapped array is let go where a process would map too many: it is mapped again when it is asked for.
    """

    def __init__(self, store: Path, info: ShardInfo, manifest: Manifest):
        self.store, self.info, self.name = store, info, info.name
        self._manifest = manifest

    @cached_property
    def tokens(self) -> np.ndarray:
        """[tokens of the shard]."""
        return self._map("tokens", self._manifest.token_dtype, (self.info.tokens,))

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [samples + 1]: where each sample's tokens begin."""
        offsets = self._map("offsets", "int64", (self.info.samples + 1,))
        first, last = int(offsets[0]), int(offsets[-1])
        if (first, last) != (0, self.info.tokens):
            path = self.path("offsets")
            raise DataError(f"{path}: offsets run from {first} to {last}, expected 0 to {self.info.tokens}")
        return offsets

    @cached_property
    def latents(self) -> np.ndarray:
        """[samples, M, C], on the encoder's own scale."""
        latent = self._manifest.latent
        return self._map("latents", self._manifest.latent_dtype, (self.info.samples, latent.tokens, latent.channels))

    @cached_property
    def characters(self) -> np.ndarray:
        """int32 [samples]: characters of each sample's text."""
        return self._map("characters", "int32", (self.info.samples,))

    def path(self, kind: str) -> Path:
        return self.store / f"{self.name}.{kind}.npy"

    def check(self) -> None:
        """DataError where the header of a file is not what the manifest says."""
        for kind in sorted(KINDS):
            getattr(self, kind)

    def lengths(self, rows: np.ndarray | None = None) -> np.ndarray:
        """int64: tokens of the samples `rows` of this shard, or of all. DataError where offsets cannot be."""
        starts, stops = (self.offsets[:-1], self.offsets[1:]) if rows is None else self.offsets[[rows, rows + 1]]
        lengths = stops - starts
        wrong = (lengths < 1) | (lengths > self._manifest.max_length) | (starts < 0) | (stops > self.info.tokens)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{self.path('offsets')}: sample {at if rows is None else rows[at]} has {lengths[at]} tokens from "
                f"{starts[at]} on, expected 1 to {self._manifest.max_length} among {self.info.tokens}"
            )
        return lengths

    def _map(self, kind: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self.path(kind)
        try:
            # A plain view of the map: indexing np.memmap itself costs a Python call each time.
            array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable array ({error})") from None
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise DataError(f"{path}: {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
        _mapped.append((weakref.ref(self), kind))
        while len(_mapped) > most_mapped():
            owner, longest = _mapped.popleft()
            if (shard := owner()) is not None:
                vars(shard).pop(longest, None)
        return array


_mapped: deque[tuple[weakref.ref[Shard], str]] = deque()  # arrays of this process, in the order of mapping


@cache
def most_mapped() -> int:
    """Arrays to map at once. Each costs a map and a file descriptor, of which the other half is left to others.

    As many descriptors are asked for as the system grants this process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        maps = 65_530  # Linux's default
    wanted = maps if hard == resource.RLIM_INFINITY else min(maps, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted // 2
