"""What is seen of latents that were brought along only when all is read: one shape, one document for each.

`Uses` are noted of each lot by itself; the rest is for one process that has the notes of all lots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.document_cache import Spool
from mmldlm.data.prepare.documents import Document, Problem
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.errors import DataError

_FILE = "uses.npy"  # int64 [k, 4] of a lot: row of the latents, number of the document or -1, its source, its line


class Uses:
    """Which rows of a file of latents the documents of a lot have."""

    def __init__(self) -> None:
        self._uses = array("q")
        self._sources: dict[str, int] = {}

    def add(self, row: int, number: int, found: Document | Problem) -> None:
        """`number` is the document's in the spool, -1 where it has a problem."""
        source = self._sources.setdefault(found.source, len(self._sources))
        self._uses.extend((row, number, source, found.line))

    def save(self, folder: Path) -> dict[str, Any]:
        np.save(folder / _FILE, np.frombuffer(self._uses, np.int64).reshape(-1, 4), allow_pickle=False)
        return {"sources": list(self._sources)}


def first_places(latents: LatentFile, counts: Sequence[int]) -> list[int]:
    """Of each lot, from how many documents and problems each has. DataError where that is not one for each latent."""
    if sum(counts) != len(latents.rows):
        raise DataError(
            f"{latents.path}: {len(latents.rows)} latents, expected {sum(counts)}, one for each document found"
        )
    return np.cumsum([0, *counts])[:-1].tolist()


def given_shape(results: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """[M, C] of the first latents of all, None where there are none."""
    return next((tuple(shape) for result in results for shape in result["shapes"]), None)


def left_out(
    latents: LatentFile | None,
    folders: Sequence[Path],
    results: Sequence[dict[str, Any]],
    tell: Callable[[Problem], None],
) -> dict[int, list[int]]:
    """Numbers of the documents that cannot be had, by lot, of lots that were spooled to `folders`; each is told."""
    found: dict[int, list[int]] = {}
    misfits = _misshapen(folders, results)
    if latents and not latents.by_position:
        misfits = _unpaired(latents, folders, results)
    for lot, number, problem in misfits:
        tell(problem)
        if number is not None:
            found.setdefault(lot, []).append(number)
    return found


_Misfit = tuple[int, int | None, Problem]


def _misshapen(folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> Iterator[_Misfit]:
    shape = given_shape(results)
    for lot, (folder, result) in enumerate(zip(folders, results, strict=True)):
        if all(tuple(other) == shape for other in result["shapes"]):
            continue
        for number, document in enumerate(Spool(folder).documents()):
            if document.latents is not None and shape is not None and document.latents.shape != shape:
                latents = list(document.latents.shape)
                reason = f"sample {document.key}: latents {latents}, expected {list(shape)} as the first has"
                yield lot, number, Problem(document.source, document.line, "mismatch", reason)


def _unpaired(latents: LatentFile, folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> Iterator[_Misfit]:
    """Documents whose latent another one has already, and at the end latents that none has."""
    owners = np.full((len(latents.rows), 2), -1, np.int64)  # lot, and which use of it
    names: list[str] | None = None
    for lot, folder in enumerate(folders):
        uses = np.load(folder / _FILE, allow_pickle=False)
        for index, (row, number, source, line) in enumerate(uses.tolist()):
            if owners[row, 0] < 0:
                owners[row] = lot, index
            elif number >= 0:
                names = names or list(latents.rows)
                owner, its_use = owners[row].tolist()
                its_lot = np.load(folders[owner] / _FILE, mmap_mode="r", allow_pickle=False)
                _, _, its_source, its_line = its_lot[its_use].tolist()
                where = f"{results[owner]['sources'][its_source]}:{its_line}"
                reason = f"id {names[row]!r} is that of {where} already"
                yield lot, number, Problem(results[lot]["sources"][source], line, "mismatch", reason)
    for key, row in latents.rows.items():
        if owners[row, 0] < 0:
            problem = Problem(str(latents.path), row + 1, "unused_latent", f"id {key!r} belongs to no document")
            yield len(folders), None, problem
