"""First stage of a preparation: cache the documents of each chunk, with the split and the group of each."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.dedup import exact_groups, near_duplicate_groups
from mmldlm.data.prepare.document_cache import DocumentCache, DocumentCacheWriter
from mmldlm.data.prepare.documents import Document, Problem
from mmldlm.data.prepare.inputs import complete_documents
from mmldlm.data.prepare.latent_pairing import LatentUses
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Chunk, read_chunk
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.data.prepare.report import ProblemLog, StageProgress
from mmldlm.data.shard_writer import SPLITS

TRAIN = SPLITS.index("train")
EXCLUDED = 255  # the split of documents that are not in the store
DOCUMENTS = "documents"  # the unit of progress
_SPLITS, _GROUPS = "splits.npy", "groups.npy"
_MAX_GROUPS_IN_MEMORY = 1 << 22
_SAMPLE_BITS = 20


def count_chunk(chunk: Chunk, config: PrepareConfig, on_document: Callable[[], None], progress: StageProgress) -> int:
    """Return the number of documents and problems of a chunk, calling `on_document` before each is counted."""
    count = 0
    for _ in progress.track(read_chunk(chunk, config), DOCUMENTS):
        on_document()
        count += 1
    return count


def cache_chunk(
    chunk: Chunk,
    config: PrepareConfig,
    latents: LatentFile | None,
    first_position: int,
    folder: Path,
    reported: Counter[str],
    on_document: Callable[[], None],
    progress: StageProgress,
) -> dict[str, Any]:
    """Read a chunk into a document cache in `folder`, with the splits and groups of its documents.

    Args:
        latents: Precomputed latents to attach to the documents.
        first_position: Position of the chunk's first document in the whole input.
        reported: Problems reported so far by kind; updated.
        on_document: Called before each document or problem is processed.

    Returns:
        The result of the task, as JSON values: counts, the shapes of imported latents, and problems.
    """
    splits, groups, uses = bytearray(), array("Q"), LatentUses()
    shapes: dict[tuple[int, ...], None] = {}  # a set in the order of insertion
    origins: Counter[str] = Counter()
    with DocumentCacheWriter(folder) as cache, ProblemLog(config, folder, reported) as problems:
        items = complete_documents(read_chunk(chunk, config), config, latents, first_position)
        for item, row in progress.track(items, DOCUMENTS):
            on_document()
            if row is not None:
                uses.add(row, -1 if isinstance(item, Problem) else len(cache), item)
            if isinstance(item, Problem):
                problems.add(item)
                continue
            group = item.group or exact_groups([item.text])[0]
            splits.append(assign_split(group, config))
            groups.append(_hash64(group))
            cache.add(item)
            if item.latents is not None:
                shapes.setdefault(item.latents.shape)
            if config.corpus:
                origins[item.source.split("/")[0]] += 1
        result = {"documents": len(cache), "shapes": list(shapes), "origins": origins, **problems.result()}
    if latents:
        result.update(uses.save(folder))
    np.save(folder / _SPLITS, np.frombuffer(splits, np.uint8), allow_pickle=False)
    np.save(folder / _GROUPS, np.frombuffer(groups, np.uint64), allow_pickle=False)
    return result


def assign_split(group: str, config: PrepareConfig) -> int:
    """Return the index in `SPLITS` of a group of documents.

    It is a function of the hash of seed and group, so a document's split does not depend on the other documents.
    """
    fraction = _hash64(f"{config.seed}:{group}") / 2**64
    if fraction < config.test_fraction:
        return SPLITS.index("test")
    return SPLITS.index("validation") if fraction < config.test_fraction + config.validation_fraction else TRAIN


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Corpus:
    """All cached chunks. Holds the splits and groups of one chunk at a time, unless a method says otherwise.

    Args:
        folders: The folders of the cached chunks, in order.
        splits_folder: Where splits are stored that differ from those in `folders`: of near-duplicates, which depend on
            other chunks, and of documents that are excluded later.
    """

    def __init__(self, folders: Sequence[Path], splits_folder: Path):
        self._folders, self._splits_folder = folders, splits_folder

    def splits(self, chunk: int) -> np.ndarray:
        """Return the split of each document of a chunk: uint8 [n], an index in `SPLITS` or `EXCLUDED`."""
        path = self._splits_folder / f"{chunk:05d}.npy"
        return np.load(path if path.exists() else self._folders[chunk] / _SPLITS, allow_pickle=False)

    def _save_splits(self, chunk: int, splits: np.ndarray) -> None:
        np.save(self._splits_folder / f"{chunk:05d}.npy", splits, allow_pickle=False)

    def exclude(self, chunk: int, indices: Sequence[int]) -> None:
        """Exclude the documents of a chunk at `indices` from the store."""
        splits = self.splits(chunk)
        splits[list(indices)] = EXCLUDED
        self._save_splits(chunk, splits)

    def num_documents(self, chunk: int) -> int:
        """Return the number of documents of a chunk that are not excluded."""
        return int((self.splits(chunk) != EXCLUDED).sum())

    def _groups(self, chunk: int) -> np.ndarray:
        return np.load(self._folders[chunk] / _GROUPS, allow_pickle=False)

    def _chunks(self) -> range:
        return range(len(self._folders))

    def documents(self, chunk: int) -> Iterator[tuple[int, Document]]:
        """Yield the split and the document for each document of a chunk that is not excluded."""
        documents = DocumentCache(self._folders[chunk]).documents()
        for split, document in zip(self.splits(chunk).tolist(), documents, strict=True):
            if split != EXCLUDED:
                yield split, document

    def split_sizes(self) -> dict[str, int]:
        """Return the number of documents in each split."""
        sizes = np.zeros(EXCLUDED + 1, np.int64)
        for chunk in self._chunks():
            sizes += np.bincount(self.splits(chunk), minlength=len(sizes))
        return dict(zip(SPLITS, sizes[: len(SPLITS)].tolist(), strict=True))

    def exact_group_statistics(self) -> dict[str, int | str]:
        """Return statistics of the groups of equal texts.

        To bound memory, groups are counted one range of their hashes at a time.
        """
        num_documents = sum(self.split_sizes().values())
        num_ranges = -(-num_documents // _MAX_GROUPS_IN_MEMORY) or 1
        num_groups = largest = 0
        for index in range(num_ranges):
            low, high = index * 2**64 // num_ranges, (index + 1) * 2**64 // num_ranges - 1
            parts = []
            for chunk in self._chunks():
                groups = self._groups(chunk)[self.splits(chunk) != EXCLUDED]
                parts.append(groups[(groups >= np.uint64(low)) & (groups <= np.uint64(high))])
            sizes = np.unique(np.concatenate(parts), return_counts=True)[1]
            num_groups += len(sizes)
            largest = max(largest, int(sizes.max(initial=0)))
        return {"method": "exact", "documents": num_documents, "groups": num_groups, "largest_group": largest}

    def split_near_duplicates(self, config: PrepareConfig) -> dict[str, Any]:
        """Assign all documents to splits again, near-duplicates to the same one, and return statistics.

        Holds all texts in memory.
        """
        keys, statistics = near_duplicate_groups(
            [document.text for chunk in self._chunks() for _, document in self.documents(chunk)]
        )
        new_splits = iter([assign_split(key, config) for key in keys])
        for chunk in self._chunks():
            splits = self.splits(chunk)
            for index in np.flatnonzero(splits != EXCLUDED).tolist():
                splits[index] = next(new_splits)
            self._save_splits(chunk, splits)
        return statistics

    def training_sample(self, max_documents: int) -> Iterator[Document]:
        """Yield the training documents in order; if there are more than `max_documents`, a sample of at most that many.

        The sample consists of the groups with the lowest hashes. It is thus independent of how the input is cut into
        chunks, and contains all copies of a text or none.
        """
        # Hashes are compared by their leading bits, whose histogram gives the threshold without sorting all hashes.
        histogram = np.zeros(1 << _SAMPLE_BITS, np.int64)
        for chunk in self._chunks():
            prefixes = self._groups(chunk)[self.splits(chunk) == TRAIN] >> np.uint64(64 - _SAMPLE_BITS)
            histogram += np.bincount(prefixes.astype(np.int64), minlength=len(histogram))
        threshold = int(np.searchsorted(np.cumsum(histogram), max_documents, side="right"))
        for chunk in self._chunks():
            is_sampled = (self._groups(chunk) >> np.uint64(64 - _SAMPLE_BITS)).astype(np.int64) < threshold
            indices = np.flatnonzero(is_sampled & (self.splits(chunk) == TRAIN))
            yield from DocumentCache(self._folders[chunk]).documents(indices.tolist())
