"""Checks of imported latents that need all chunks: every latent has the same shape and belongs to one document.

`LatentUses` are recorded for each chunk separately; the other functions run in one process, with the records of all.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.corpus import DocumentCache
from mmldlm.data.prepare.documents import Document, Problem
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.errors import DataError

# int64 [k, 4] of a chunk: row of the latents, index of the document in its cache or -1, index of its source, its line
_FILE = "uses.npy"


class LatentUses:
    """The rows of a latent file that the documents of a chunk refer to."""

    def __init__(self) -> None:
        self._uses = array("q")
        self._sources: dict[str, int] = {}

    def add(self, row: int, index: int, item: Document | Problem) -> None:
        """Record that `item` refers to `row`; `index` is its position in the document cache, -1 for a problem."""
        source = self._sources.setdefault(item.source, len(self._sources))
        self._uses.extend((row, index, source, item.line))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the records to `folder` and return what belongs into the result of the chunk."""
        np.save(folder / _FILE, np.frombuffer(self._uses, np.int64).reshape(-1, 4), allow_pickle=False)
        return {"sources": list(self._sources)}


def first_positions(latents: LatentFile, counts: Sequence[int]) -> list[int]:
    """Return the position of each chunk's first document in the whole input, given the number in each chunk.

    If latents, which belong to documents by position, are more or fewer, that is a `DataError`.
    """
    if sum(counts) != len(latents.rows):
        raise DataError(
            f"{latents.path}: {len(latents.rows)} latents, expected {sum(counts)}, one for each document found"
        )
    return np.cumsum([0, *counts])[:-1].tolist()


def first_latent_shape(results: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the shape [M, C] of the first imported latents of all chunks, None if there are none."""
    return next((tuple(shape) for result in results for shape in result["shapes"]), None)


def find_unusable(
    latents: LatentFile | None,
    folders: Sequence[Path],
    results: Sequence[dict[str, Any]],
    report: Callable[[Problem], None],
) -> dict[int, list[int]]:
    """Return by chunk the indices of documents whose latents have a wrong shape or belong to an earlier document.

    Each problem is reported, also latents without a document.
    """
    unusable: dict[int, list[int]] = {}
    # A file of latents has one shape; only included latents can differ. Both functions are generators, so one runs.
    misfits = _find_misshapen(folders, results)
    if latents and not latents.by_position:
        misfits = _find_unpaired(latents, folders, results)
    for chunk, index, problem in misfits:
        report(problem)
        if index is not None:
            unusable.setdefault(chunk, []).append(index)
    return unusable


_Misfit = tuple[int, int | None, Problem]  # chunk, index of the document in it, problem


def _find_misshapen(folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> Iterator[_Misfit]:
    """Yield documents whose latents have another shape than the first document's."""
    shape = first_latent_shape(results)
    for chunk, (folder, result) in enumerate(zip(folders, results, strict=True)):
        if all(tuple(other) == shape for other in result["shapes"]):
            continue
        for index, document in enumerate(DocumentCache(folder).documents()):
            if document.latents is not None and shape is not None and document.latents.shape != shape:
                latents = list(document.latents.shape)
                reason = f"sample {document.key}: latents {latents}, expected {list(shape)} like the first sample"
                yield chunk, index, Problem(document.source, document.line, "mismatch", reason)


def _find_unpaired(
    latents: LatentFile, folders: Sequence[Path], results: Sequence[dict[str, Any]]
) -> Iterator[_Misfit]:
    """Yield documents whose latent belongs to an earlier document, then the latents without a document."""
    owners = np.full((len(latents.rows), 2), -1, np.int64)  # by row: chunk of its first use, index of that use
    names: list[str] | None = None
    for chunk, folder in enumerate(folders):
        uses = np.load(folder / _FILE, allow_pickle=False)
        for use, (row, index, source, line) in enumerate(uses.tolist()):
            if owners[row, 0] < 0:
                owners[row] = chunk, use
            # A problem (-1) has been reported already and is in no store.
            elif index >= 0:
                # The ids in order of the rows, listed only once there is something to report.
                names = names or list(latents.rows)
                owner_chunk, owner_use = owners[row].tolist()
                owner_uses = np.load(folders[owner_chunk] / _FILE, mmap_mode="r", allow_pickle=False)
                _, _, owner_source, owner_line = owner_uses[owner_use].tolist()
                owner = f"{results[owner_chunk]['sources'][owner_source]}:{owner_line}"
                reason = f"id {names[row]!r} is already used by {owner}"
                yield chunk, index, Problem(results[chunk]["sources"][source], line, "mismatch", reason)
    for key, row in latents.rows.items():
        if owners[row, 0] < 0:
            problem = Problem(str(latents.path), row + 1, "unused_latent", f"id {key!r} belongs to no document")
            yield len(folders), None, problem
