"""Verify a store before training: compare the hashes of its files, and check every sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmldlm.data.manifest import MANIFEST_NAME, SPLITS
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo, open_regular
from mmldlm.utils.partition import partition_by_size
from mmldlm.utils.progress import Progress

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

TRAINING_SPLITS = SPLITS[:2]  # read by training
_CHUNK_BYTES = 1 << 20
_EXPONENT_BITS = {2: 0x7C00, 4: 0x7F800000}  # by bytes per float. They are all set exactly if the float is not finite


class BadSample(NamedTuple):
    """A sample that we cannot train on, although its store is undamaged."""

    split: int  # in `SPLITS`
    sample: int  # index in the split
    reason: str


def verify(store: Store, full: bool, max_bad_samples: int, engine: Engine) -> tuple[Store, list[str]]:
    """Return the verified store without its bad samples, and a line about each of them (collective).

    `full` hashes all files and checks all samples of the training splits, shared by the ranks. Otherwise nothing is
    read, but ranks still communicate, as their configs are not compared yet.

    Raises:
        DataError: A file contradicts the manifest, or there are more than `max_bad_samples`. All ranks raise it.
    """
    # Ranks that see the same folder share the work. If a node has its own copy, its own ranks read it.
    manifests = [(source.path / MANIFEST_NAME).stat() for source in store.sources]
    folder_id = [[manifest.st_ino, manifest.st_ctime_ns] for manifest in manifests]
    # Gather `full` too: ranks with `sizes` read nothing, and must not get a part.
    folder_ids = engine.gather([full, folder_id], "data folders")
    sharing = [rank for rank, other in enumerate(folder_ids) if other == folder_ids[engine.rank]]
    count, bad = 0, list[BadSample]()
    with engine.raise_on_all_ranks("verification of the data"):
        if full:
            # Keep one more than allowed, so that the error can name the first of too many.
            with Progress(engine.rank == 0) as progress:
                progress.phase("verifying the data", announce=False)
                part, parts = sharing.index(engine.rank), len(sharing)
                count, bad = verify_part(store, part, parts, max_bad_samples + 1, progress=progress)
    # All copies have equal hashes and so the same bad samples, so count only rank 0's copy.
    local_result = (count, bad) if 0 in sharing else (0, [])
    results = engine.gather(local_result, "bad samples of the data")
    total = sum(count for count, _ in results)
    bad = sorted(BadSample(*sample) for _, samples in results for sample in samples)
    return _leave_out(store, total, bad, max_bad_samples, TRAINING_SPLITS), [sample.reason for sample in bad]


def drop_bad_samples(store: Store, split: str, max_bad_samples: int) -> Store:
    """Return the store without the bad samples of `split`, at most `max_bad_samples` (single process).

    If that is 0, nothing is read here, and reading the first bad sample raises later. It is a `DataError` if there are
    more bad samples.
    """
    if not max_bad_samples:
        return store
    total, bad = verify_part(store, keep=max_bad_samples + 1, splits=(split,))
    return _leave_out(store, total, bad, max_bad_samples, (split,))


def _leave_out(
    store: Store, total: int, bad: Sequence[BadSample], max_bad_samples: int, splits: Sequence[str]
) -> Store:
    """Return the store without its bad samples `bad`, or raise `DataError` if the `total` exceeds `max_bad_samples`."""
    if total > max_bad_samples:
        raise DataError(
            f"{bad[0].reason} ({total} bad samples in {' and '.join(splits)}, "
            f"data.max_bad_samples is {max_bad_samples})"
        )
    indices = {name: [sample.sample for sample in bad if sample.split == split] for split, name in enumerate(SPLITS)}
    return store.without(indices) if bad else store


def verify_part(
    store: Store,
    part: int = 0,
    parts: int = 1,
    keep: int = 1,
    splits: Sequence[str] = TRAINING_SPLITS,
    progress: Progress | None = None,
) -> tuple[int, list[BadSample]]:
    """Verify one of `parts` nearly equal parts of `splits` and of the other files.

    Returns:
        The number of bad samples, and the first `keep` of them.

    Raises:
        DataError: A file is damaged.
    """
    count, bad = 0, list[BadSample]()
    items = sorted(partition_items(store, parts, splits)[part])
    for item in progress.track(items, "shards and files", len(items)) if progress else items:
        bad_in_item = verify_item(store, item)
        count, bad = count + len(bad_in_item), (bad + bad_in_item)[:keep]
    return count, bad


def partition_items(
    store: Store, parts: int, splits: Sequence[str] = TRAINING_SPLITS
) -> list[list[tuple[int, int, str]]]:
    """Partition shards of `splits` and all other files into `parts` of nearly equal size, the same on every rank.

    Items are (split, shard, name) for a shard, and (number of splits, source, name) for another file.
    """
    sizes = {
        (len(SPLITS), number, name): info.bytes
        for number, source in enumerate(store.sources)
        for name, info in source.manifest.files.items()
    }
    for split in splits:
        for index, shard in enumerate(store.split(split).shards):
            sizes[SPLITS.index(split), index, shard.info.name] = sum(info.bytes for info in shard.info.files.values())
    return partition_by_size(sizes, parts)


def verify_item(store: Store, item: tuple[int, int, str]) -> list[BadSample]:
    """Hash a file, or hash a shard's files and check all its offsets, tokens and latents. Return the bad samples.

    `item` is one of the items that `partition_items` returns. It is a `DataError` if a file is damaged.
    """
    split_number, shard_number, name = item
    if split_number == len(SPLITS):
        source = store.sources[shard_number]
        for _ in _read_and_hash(source.path / name, source.manifest.files[name]):
            pass
        return []
    split = store.split(SPLITS[split_number])
    shard, reasons = split.shards[shard_number], dict[int, str]()
    first_index = int(split.shard_starts[shard_number])
    shard.lengths()  # raises if offsets are not increasing
    for suffix, info in shard.info.files.items():
        kind = suffix.removesuffix(".npy")
        array = getattr(shard, kind)
        row_bytes = array[0].nbytes  # of a token, or of a sample's latents
        first = 0
        # The next chunk reuses the buffer, so results must not refer to `rows`.
        for chunk in _read_and_hash(shard.path(kind), info, info.bytes - array.nbytes, row_bytes):
            rows = np.frombuffer(chunk, array.dtype).reshape(-1, *array.shape[1:])
            if kind == "tokens":
                positions = np.flatnonzero(rows >= split.manifest.vocab_size)
                # `offsets` [samples + 1] are strictly increasing, so this finds the sample with each position.
                samples, nth = np.unique(
                    np.searchsorted(shard.offsets, first + positions, side="right") - 1, return_index=True
                )
                for index, token in zip((first_index + samples).tolist(), rows[positions[nth]].tolist(), strict=True):
                    reasons[index] = split.unknown_token_message(index, token)
            elif kind == "latents":
                # Compare bits: np.isfinite on half precision is slower than SHA-256.
                exponent = _EXPONENT_BITS[rows.itemsize]
                nonfinite = (rows.view(f"u{rows.itemsize}") & exponent) == exponent
                for sample in np.flatnonzero(nonfinite.any(axis=(1, 2))).tolist() if nonfinite.any() else ():
                    index = first_index + first + sample
                    reasons[index] = split.nonfinite_message(index)
            first += len(rows)
    return [BadSample(split_number, index, reasons[index]) for index in sorted(reasons)]


def _read_and_hash(path: Path, info: FileInfo, header_bytes: int = 0, row_bytes: int = 1) -> Iterator[memoryview]:
    """Yield the file after its header in chunks of whole rows, then raise `DataError` if its hash is wrong.

    We read the file instead of mapping it: if a mapped file is truncated, or its disk fails, the process dies.
    """
    buffer = memoryview(bytearray(max(1, _CHUNK_BYTES // row_bytes) * row_bytes))
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            digest.update(file.read(header_bytes))
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
                # A file that is cut off while we read it ends within a row. The hash below reports it.
                yield buffer[: read // row_bytes * row_bytes]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if digest.hexdigest() != info.sha256:
        raise DataError(
            f"{path}: damaged: SHA-256 is {digest.hexdigest()[:12]}..., expected {info.sha256[:12]}...; "
            "copy or prepare the store again"
        )
