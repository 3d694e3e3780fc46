"""The first stage: a lot of the input becomes a spool of documents, with what the later stages need to know of them."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.dedup import exact_groups, near_duplicate_groups
from mmldlm.data.prepare.document_cache import Spool, SpoolWriter
from mmldlm.data.prepare.documents import Document, Problem
from mmldlm.data.prepare.inputs import completed
from mmldlm.data.prepare.latent_pairing import Uses
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Lot, read_lot
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.data.prepare.report import Problems, StageProgress
from mmldlm.data.shard_writer import SPLITS

TRAIN = SPLITS.index("train")
LEFT_OUT = 255  # in place of a split
DOCUMENTS = "documents"
_SPLITS, _GROUPS = "splits.npy", "groups.npy"
_GROUPS_AT_ONCE = 1 << 22
_SAMPLE_BITS = 20


def count_lot(lot: Lot, config: PrepareConfig, each: Callable[[], None], shown: StageProgress) -> int:
    """Documents and problems of a lot; `each` is called before each of them."""
    count = 0
    for _ in shown.over(read_lot(lot, config), DOCUMENTS):
        each()
        count += 1
    return count


def spool_lot(
    lot: Lot,
    config: PrepareConfig,
    latents: LatentFile | None,
    first: int,
    folder: Path,
    told: Counter[str],
    each: Callable[[], None],
    shown: StageProgress,
) -> dict[str, Any]:
    """Fill `folder`; the result has the shapes of latents that came along. `each` is called before each document.

    `latents` are precomputed ones; `first` is the place of the lot's first document in the whole input.
    """
    splits, groups, uses = bytearray(), array("Q"), Uses()
    shapes: dict[tuple[int, ...], None] = {}
    origins: Counter[str] = Counter()
    with SpoolWriter(folder) as spool, Problems(config, folder, told) as problems:
        stream = completed(read_lot(lot, config), config, latents, first)
        for found, row in shown.over(stream, DOCUMENTS):
            each()
            if row is not None:
                uses.add(row, -1 if isinstance(found, Problem) else len(spool), found)
            if isinstance(found, Problem):
                problems.add(found)
                continue
            group = found.group or exact_groups([found.text])[0]
            splits.append(split_of(group, config))
            groups.append(_number(group))
            spool.add(found)
            if found.latents is not None:
                shapes.setdefault(found.latents.shape)
            if config.corpus:
                origins[found.source.split("/")[0]] += 1
        result = {"documents": len(spool), "shapes": list(shapes), "origins": origins, **problems.result()}
    if latents:
        result.update(uses.save(folder))
    np.save(folder / _SPLITS, np.frombuffer(splits, np.uint8), allow_pickle=False)
    np.save(folder / _GROUPS, np.frombuffer(groups, np.uint64), allow_pickle=False)
    return result


def split_of(group: str, config: PrepareConfig) -> int:
    """By a hash of the group and the seed, so that a document's split does not depend on the others'."""
    place = _number(f"{config.seed}:{group}") / 2**64
    if place < config.test_fraction:
        return SPLITS.index("test")
    return SPLITS.index("validation") if place < config.test_fraction + config.validation_fraction else TRAIN


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Corpus:
    """All lots as they were spooled: `folders` in order. Holds numbers of one lot at a time, unless said otherwise.

    `decided` is where the splits of lots lie that could not be settled by the lot alone.
    """

    def __init__(self, folders: Sequence[Path], decided: Path):
        self._folders, self._decided = folders, decided

    def splits(self, lot: int) -> np.ndarray:
        """uint8 [n] of a lot: which of `SPLITS` each document is in, or that it is left out."""
        path = self._decided / f"{lot:05d}.npy"
        return np.load(path if path.exists() else self._folders[lot] / _SPLITS, allow_pickle=False)

    def _decide(self, lot: int, splits: np.ndarray) -> None:
        np.save(self._decided / f"{lot:05d}.npy", splits, allow_pickle=False)

    def leave_out(self, lot: int, numbers: Sequence[int]) -> None:
        """These documents of a lot."""
        splits = self.splits(lot)
        splits[list(numbers)] = LEFT_OUT
        self._decide(lot, splits)

    def count(self, lot: int) -> int:
        """Documents of a lot."""
        return int((self.splits(lot) != LEFT_OUT).sum())

    def _groups(self, lot: int) -> np.ndarray:
        return np.load(self._folders[lot] / _GROUPS, allow_pickle=False)

    def _lots(self) -> range:
        return range(len(self._folders))

    def documents(self, lot: int) -> Iterator[tuple[int, Document]]:
        """Of a lot, each with its split, but those that are left out."""
        for split, document in zip(self.splits(lot).tolist(), Spool(self._folders[lot]).documents(), strict=True):
            if split != LEFT_OUT:
                yield split, document

    def split_sizes(self) -> dict[str, int]:
        """Documents in each split."""
        sizes = np.zeros(LEFT_OUT + 1, np.int64)
        for lot in self._lots():
            sizes += np.bincount(self.splits(lot), minlength=len(sizes))
        return dict(zip(SPLITS, sizes[: len(SPLITS)].tolist(), strict=True))

    def exact_grouping(self) -> dict[str, int | str]:
        """Statistics of groups of equal texts; those whose numbers lie in one range are counted at a time."""
        count = sum(self.split_sizes().values())
        ranges = -(-count // _GROUPS_AT_ONCE) or 1
        groups = largest = 0
        for index in range(ranges):
            low, high = index * 2**64 // ranges, (index + 1) * 2**64 // ranges - 1
            parts = []
            for lot in self._lots():
                found = self._groups(lot)[self.splits(lot) != LEFT_OUT]
                parts.append(found[(found >= np.uint64(low)) & (found <= np.uint64(high))])
            sizes = np.unique(np.concatenate(parts), return_counts=True)[1]
            groups += len(sizes)
            largest = max(largest, int(sizes.max(initial=0)))
        return {"method": "exact", "documents": count, "groups": groups, "largest_group": largest}

    def decide_near_duplicates(self, config: PrepareConfig) -> dict[str, Any]:
        """Decide on the splits of all lots, alike of near-duplicates: statistics. Holds all texts."""
        keys, statistics = near_duplicate_groups(
            [document.text for lot in self._lots() for _, document in self.documents(lot)]
        )
        decided = iter([split_of(key, config) for key in keys])
        for lot in self._lots():
            splits = self.splits(lot)
            for number in np.flatnonzero(splits != LEFT_OUT).tolist():
                splits[number] = next(decided)
            self._decide(lot, splits)
        return statistics

    def training_sample(self, most: int) -> Iterator[Document]:
        """All training documents, in order; of more than about `most`, those of the groups with the lowest numbers.

        So they do not depend on how the input is cut, and copies of a text are taken together or not at all.
        """
        histogram = np.zeros(1 << _SAMPLE_BITS, np.int64)
        for lot in self._lots():
            chosen = self._groups(lot)[self.splits(lot) == TRAIN] >> np.uint64(64 - _SAMPLE_BITS)
            histogram += np.bincount(chosen.astype(np.int64), minlength=len(histogram))
        below = int(np.searchsorted(np.cumsum(histogram), most, side="right"))
        for lot in self._lots():
            taken = (self._groups(lot) >> np.uint64(64 - _SAMPLE_BITS)).astype(np.int64) < below
            chosen = np.flatnonzero(taken & (self.splits(lot) == TRAIN))
            yield from Spool(self._folders[lot]).documents(chosen.tolist())
