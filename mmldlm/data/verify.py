"""Verification of a store before training: hashes of its files, and a check of every sample."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mmldlm.data.dataset import Split
from mmldlm.data.manifest import MANIFEST_NAME
from mmldlm.data.shard_writer import SPLITS
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from mmldlm.utils.files import FileInfo
from mmldlm.utils.partition import partition_by_size
from mmldlm.utils.progress import Progress

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

TRAINING_SPLITS = SPLITS[:2]  # read by training
_CHUNK_BYTES = 1 << 20
_EXPONENT_BITS = {2: 0x7C00, 4: 0x7F800000}  # by bytes per float; all set exactly if the float is not finite


class BadSample(NamedTuple):
    """A sample that cannot be trained on though its store is undamaged."""

    split: int  # in `SPLITS`
    sample: int  # index in the split
    reason: str


def verify(store: Store, full: bool, max_bad_samples: int, engine: Engine) -> tuple[Store, list[str]]:
    """Verify the store and leave out its bad samples, at most `max_bad_samples` (collective).

    Args:
        full: Hash all files and check all samples of the training splits, shared by the ranks. If False nothing is
            read, but ranks still communicate, as their configs are not compared yet.

    Returns:
        The store without its bad samples, and a line about each of them.

    Raises:
        DataError: On all ranks, if a file is not as the manifest says, offsets are not increasing, or more samples are
            bad than allowed.
    """
    # Ranks that see the same folder share the work; another node's own copy is read by the ranks of that node.
    manifests = [(source.path / MANIFEST_NAME).stat() for source in store.sources]
    folder_id = [[manifest.st_ino, manifest.st_ctime_ns] for manifest in manifests]
    # `full` is gathered too: ranks with `sizes` read nothing, and must not be given a part.
    folder_ids = engine.gather([full, folder_id], "data folders")
    sharing = [rank for rank, other in enumerate(folder_ids) if other == folder_ids[engine.rank]]
    count, bad = 0, list[BadSample]()
    with engine.raise_on_all_ranks("verification of the data"):
        if full:
            # One more than allowed is kept, so that the error can name the first of too many.
            with Progress(engine.rank == 0) as progress:
                progress.phase("verifying the data", announce=False)
                part, parts = sharing.index(engine.rank), len(sharing)
                count, bad = verify_part(store, part, parts, max_bad_samples + 1, progress=progress)
    # All copies have equal hashes and so the same bad samples: count those of rank 0's copy.
    local_result = (count, bad) if 0 in sharing else (0, [])
    results = engine.gather(local_result, "bad samples of the data")
    total = sum(count for count, _ in results)
    bad = sorted(BadSample(*sample) for _, samples in results for sample in samples)
    return _leave_out(store, total, bad, max_bad_samples, TRAINING_SPLITS), [sample.reason for sample in bad]


def drop_bad_samples(store: Store, split: str, max_bad_samples: int) -> Store:
    """Return the store without the bad samples of `split`, at most `max_bad_samples` (single process).

    If none may be left out nothing is read here: reading the first bad sample raises later. More are a `DataError`.
    """
    if not max_bad_samples:
        return store
    total, bad = verify_part(store, keep=max_bad_samples + 1, splits=(split,))
    return _leave_out(store, total, bad, max_bad_samples, (split,))


def _leave_out(
    store: Store, total: int, bad: Sequence[BadSample], max_bad_samples: int, splits: Sequence[str]
) -> Store:
    """Return the store without its `total` bad samples, of which `bad` are the first; DataError if too many."""
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
    """Verify the `part`-th of `parts` nearly equal parts of `splits`, and count its files in `progress`.

    Returns:
        The number of bad samples, and the first `keep` of them.

    Raises:
        DataError: Names the first file that is damaged.
    """
    items = sorted(partition_items(store, parts, splits)[part])
    tracked = progress.track(items, "shards and files", len(items)) if progress else items
    return verify_items(store, tracked, keep)


def verify_items(store: Store, items: Iterable[tuple[int, int, str]], keep: int) -> tuple[int, list[BadSample]]:
    """Verify shards and files, given as `partition_items` returns them, as `verify_part` does."""
    count, bad = 0, list[BadSample]()
    for split, index, name in items:
        if split < len(SPLITS):
            bad_in_shard = _verify_shard(store, split, index)
            count, bad = count + len(bad_in_shard), (bad + bad_in_shard)[:keep]
        else:
            source = store.sources[index]
            for _ in _read_and_hash(source.path / name, source.manifest.files[name]):
                pass
    return count, bad


def partition_items(
    store: Store, parts: int, splits: Sequence[str] = TRAINING_SPLITS
) -> list[list[tuple[int, int, str]]]:
    """Partition shards of `splits` and all other files into `parts` of nearly equal size, the same on every rank.

    Returns:
        The items of each part: (split, shard, name) for a shard, (number of splits, source, name) for another file.
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


def _verify_shard(store: Store, split_number: int, shard_number: int) -> list[BadSample]:
    """Hash the files of a shard and check every offset, token and latent."""
    split = store.split(SPLITS[split_number])
    shard, reasons = split.shards[shard_number], dict[int, str]()
    shard.lengths()  # raises if offsets are not increasing
    for suffix, info in shard.info.files.items():
        kind = suffix.removesuffix(".npy")
        array = getattr(shard, kind)
        row_bytes = array[0].nbytes  # of a token, or of a sample's latents
        first = 0
        # The buffer is reused by the next chunk: results must not refer to `rows`.
        for chunk in _read_and_hash(shard.path(kind), info, info.bytes - array.nbytes, row_bytes):
            rows = np.frombuffer(chunk, array.dtype).reshape(-1, *array.shape[1:])
            if kind == "tokens":
                reasons.update(_bad_tokens(split, shard_number, rows, first))
            elif kind == "latents":
                reasons.update(_bad_latents(split, shard_number, rows, first))
            first += len(rows)
    return [BadSample(split_number, index, reasons[index]) for index in sorted(reasons)]


def _bad_tokens(split: Split, shard: int, tokens: np.ndarray, first: int) -> Iterator[tuple[int, str]]:
    """Yield (sample index, reason) of each sample with an unknown token among `tokens`, which begin at `first`."""
    positions = np.flatnonzero(tokens >= split.manifest.vocab_size)
    # `offsets` [samples + 1] are strictly increasing, so this finds the sample that contains each position.
    samples = np.searchsorted(split.shards[shard].offsets, first + positions, side="right") - 1
    unique, first_of_sample = np.unique(samples, return_index=True)
    for sample, nth in zip(unique.tolist(), first_of_sample.tolist(), strict=True):
        index = split.first_index(shard) + sample
        yield index, split.unknown_token_message(index, int(tokens[positions[nth]]))


def _bad_latents(split: Split, shard: int, latents: np.ndarray, first: int) -> Iterator[tuple[int, str]]:
    """Yield (sample index, reason) of each sample with a non-finite latent; `latents` begin at sample `first`."""
    # Compare bits: np.isfinite on half precision is slower than SHA-256.
    exponent = _EXPONENT_BITS[latents.itemsize]
    nonfinite = (latents.view(f"u{latents.itemsize}") & exponent) == exponent
    if nonfinite.any():
        for sample in np.flatnonzero(nonfinite.any(axis=(1, 2))).tolist():
            index = split.first_index(shard) + first + sample
            yield index, split.nonfinite_message(index)


def _read_and_hash(path: Path, info: FileInfo, header_bytes: int = 0, row_bytes: int = 1) -> Iterator[memoryview]:
    """Yield the file after its header in chunks of whole rows; DataError at the end if its hash is wrong.

    The file is read, not mapped: a mapped file that is truncated, or whose disk fails, kills the process.
    """
    buffer = memoryview(bytearray(max(1, _CHUNK_BYTES // row_bytes) * row_bytes))
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            digest.update(file.read(header_bytes))
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
                # A file cut off while it is read ends within a row; the hash below reports it.
                yield buffer[: read // row_bytes * row_bytes]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if digest.hexdigest() != info.sha256:
        raise DataError(
            f"{path}: damaged: SHA-256 is {digest.hexdigest()[:12]}..., expected {info.sha256[:12]}...; "
            "copy or prepare the store again"
        )
