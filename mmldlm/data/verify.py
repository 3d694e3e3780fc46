"""Whether a store is still what was written, and fit to train on: hashes of its files, and a look at every sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME
from mmldlm.data.store import Split, Store
from mmldlm.data.store_writer import SPLITS
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo
from mmldlm.utils.partition import partition_by_size

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

TRAINING = SPLITS[:2]  # what training reads
_CHUNK = 1 << 20
_EXPONENT = {2: 0x7C00, 4: 0x7F800000}  # bits that are all set in a float of so many bytes that is not finite


class BadSample(NamedTuple):
    """A row that nobody can train on, in a store that was written so; `split` counts those that were read."""

    split: int
    row: int
    why: str


def verify(store: Store, full: bool, max_bad_samples: int, runtime: Engine) -> tuple[Store, list[str]]:
    """Collective: the store without its bad samples, and a line about each of them.

    DataError on all ranks where a file is not what the manifest says, offsets do not rise, or more samples are bad.
    Unless `full`, nothing is read; the ranks take part all the same, as their configs are yet to be compared.
    """
    # Ranks that see one and the same folder share the work; a copy on another node is read by the ranks there.
    manifests = [(source.path / MANIFEST_NAME).stat() for source in store.sources]
    seen = [[manifest.st_ino, manifest.st_ctime_ns] for manifest in manifests]
    places = runtime.gather([full, seen], "places of the data")
    sharing = [rank for rank, place in enumerate(places) if place == places[runtime.rank]]
    count, bad = 0, list[BadSample]()
    with runtime.raise_on_all_ranks("verification of the data"):
        if full:
            count, bad = read_part(store, sharing.index(runtime.rank), len(sharing), max_bad_samples + 1)
    # As their hashes are equal, all copies have the same bad samples: those of rank 0's copy count.
    mine = (count, bad) if 0 in sharing else (0, [])
    parts = runtime.gather(mine, "bad samples of the data")
    total = sum(count for count, _ in parts)
    found = sorted(BadSample(*sample) for _, samples in parts for sample in samples)
    return _left_out(store, total, found, max_bad_samples, TRAINING), [sample.why for sample in found]


def without_bad(store: Store, split: str, max_bad_samples: int) -> Store:
    """In one process: the store without the bad samples of `split`, of which up to `max_bad_samples` are left out.

    Where none may be left out nothing is read: the first that is met is refused.
    """
    if not max_bad_samples:
        return store
    total, found = read_part(store, keep=max_bad_samples + 1, splits=(split,))
    return _left_out(store, total, found, max_bad_samples, (split,))


def _left_out(
    store: Store, total: int, found: Sequence[BadSample], max_bad_samples: int, splits: Sequence[str]
) -> Store:
    """DataError where more samples than allowed are bad; `found` are the first of them."""
    if total > max_bad_samples:
        raise DataError(
            f"{found[0].why} ({total} bad samples in {' and '.join(splits)}, data.max_bad_samples is {max_bad_samples})"
        )
    rows = {name: [sample.row for sample in found if sample.split == number] for number, name in enumerate(SPLITS)}
    return store.without(rows) if found else store


def read_part(
    store: Store, part: int = 0, parts: int = 1, keep: int = 1, splits: Sequence[str] = TRAINING
) -> tuple[int, list[BadSample]]:
    """Read the `part`-th of `parts` of the store, of these splits: its number of bad samples, and the first.

    DataError naming the first file that is not what was written.
    """
    return read_items(store, deal(store, parts, splits)[part], keep)


def read_items(store: Store, items: Sequence[tuple[int, int, str]], keep: int) -> tuple[int, list[BadSample]]:
    """Read these shards and files, as `deal` gives them: the number of bad samples, and the first `keep`.

    DataError naming the first file that is not what was written.
    """
    count, bad = 0, list[BadSample]()
    for split, index, name in sorted(items):
        if split < len(SPLITS):
            found = _read_shard(store, split, index)
            count, bad = count + len(found), (bad + found)[:keep]
        else:
            source = store.sources[index]
            for _ in _chunks(source.path / name, source.manifest.files[name]):
                pass
    return count, bad


def deal(store: Store, parts: int, splits: Sequence[str] = TRAINING) -> list[list[tuple[int, int, str]]]:
    """All shards of `splits` and other files in `parts` of nearly equal size, the same on every rank.

    Shards are (split, shard, name), other files (number of splits, source, name).
    """
    sizes = {
        (len(SPLITS), number, name): info.bytes
        for number, source in enumerate(store.sources)
        for name, info in source.manifest.files.items()
    }
    for split in splits:
        for index, shard in enumerate(store.split(split).shards):
            sizes[SPLITS.index(split), index, shard.name] = sum(info.bytes for info in shard.info.files.values())
    return partition_by_size(sizes, parts)


def _read_shard(store: Store, number: int, index: int) -> list[BadSample]:
    """Hash the files of a shard and look at every offset, token and latent."""
    split = store.split(SPLITS[number])
    shard, why = split.shards[index], dict[int, str]()
    shard.lengths()  # refuses offsets that do not rise
    for suffix, info in shard.info.files.items():
        kind = suffix.removesuffix(".npy")
        array = getattr(shard, kind)
        size = array[0].nbytes  # of a token, of a sample's latents
        first = 0
        for chunk in _chunks(shard.path(kind), info, info.bytes - array.nbytes, size):
            rows = np.frombuffer(chunk, array.dtype).reshape(-1, *array.shape[1:])
            if kind == "tokens":
                why.update(_bad_tokens(split, index, rows, first))
            elif kind == "latents":
                why.update(_bad_latents(split, index, rows, first))
            first += len(rows)
    return [BadSample(number, row, why[row]) for row in sorted(why)]


def _bad_tokens(split: Split, index: int, tokens: np.ndarray, first: int) -> Iterator[tuple[int, str]]:
    at = np.flatnonzero(tokens >= split.manifest.vocab_size)
    samples = np.searchsorted(split.shards[index].offsets, first + at, side="right") - 1
    for sample, place in zip(*(found.tolist() for found in np.unique(samples, return_index=True)), strict=True):
        row = split.first_row(index) + sample
        yield row, split.unknown_token(row, int(tokens[at[place]]))


def _bad_latents(split: Split, index: int, latents: np.ndarray, first: int) -> Iterator[tuple[int, str]]:
    # On bits, since numpy tells half-precision numbers apart more slowly than SHA-256 hashes them.
    exponent = _EXPONENT[latents.itemsize]
    unlike = (latents.view(f"u{latents.itemsize}") & exponent) == exponent
    if unlike.any():
        for sample in np.flatnonzero(unlike.any(axis=(1, 2))).tolist():
            row = split.first_row(index) + first + sample
            yield row, split.not_finite(row)


def _chunks(path: Path, info: FileInfo, header: int = 0, size: int = 1) -> Iterator[memoryview]:
    """The file behind its first `header` bytes, in whole pieces of `size` bytes, many at a time.

    DataError at its end where it is not what was written. Read, not mapped: a mapped file that is cut short, or whose
    disk fails, kills the process.
    """
    buffer = memoryview(bytearray(max(1, _CHUNK // size) * size))
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            digest.update(file.read(header))
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
                yield buffer[: read // size * size]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if digest.hexdigest() != info.sha256:
        raise DataError(
            f"{path}: damaged: SHA-256 is {digest.hexdigest()[:12]}..., expected {info.sha256[:12]}...; "
            "copy or prepare the store again"
        )
