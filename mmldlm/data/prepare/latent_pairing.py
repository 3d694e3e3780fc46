"""Checks of imported latents that need all chunks: every latent has the same shape and belongs to one document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.corpus import cached_documents
from mmldlm.data.prepare.documents import Problem
from mmldlm.data.prepare.readers.latents import LatentFile

# What the documents of a chunk refer to, written by the stage `read`: int64 [k, 4], with the row of the latents, the
# index of the document in its cache or -1 if it is a problem, the index of its source in the chunk's result, its line.
USES_FILE = "uses.npy"
Misfit = tuple[int, int | None, Problem]  # chunk, index of the document in it, problem


def first_latent_shape(results: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the shape [M, C] of the first imported latents of all chunks, None if there are none."""
    return next((tuple(shape) for result in results for shape in result["shapes"]), None)


def find_misfits(
    latents: LatentFile | None, folders: Sequence[Path], results: Sequence[dict[str, Any]]
) -> Iterator[Misfit]:
    """Yield documents whose latents have a wrong shape or belong to an earlier document, and latents without one.

    `folders` and `results` are of the stage `read`, by chunk.
    """
    # A file of latents has one shape; only included latents can differ.
    if latents and not latents.by_position:
        return _find_unpaired(latents, folders, results)
    return _find_misshapen(folders, results)


def _find_misshapen(folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> Iterator[Misfit]:
    """Yield documents whose latents have another shape than the first document's."""
    shape = first_latent_shape(results)
    for chunk, (folder, result) in enumerate(zip(folders, results, strict=True)):
        if all(tuple(other) == shape for other in result["shapes"]):
            continue
        for index, document in enumerate(cached_documents(folder)):
            if document.latents is not None and shape is not None and document.latents.shape != shape:
                latents = list(document.latents.shape)
                reason = f"sample {document.key}: latents {latents}, expected {list(shape)} like the first sample"
                yield chunk, index, document.problem("mismatch", reason)


def _find_unpaired(latents: LatentFile, folders: Sequence[Path], results: Sequence[dict[str, Any]]) -> Iterator[Misfit]:
    """Yield documents whose latent belongs to an earlier document, then the latents without a document."""
    owners = np.full((len(latents.rows), 2), -1, np.int64)  # by row: chunk of its first use, index of that use
    names: list[str] | None = None
    for chunk, folder in enumerate(folders):
        uses = np.load(folder / USES_FILE, allow_pickle=False)
        for use, (row, index, source, line) in enumerate(uses.tolist()):
            if owners[row, 0] < 0:
                owners[row] = chunk, use
            # A problem (-1) has been reported already and is in no store.
            elif index >= 0:
                # The ids in order of the rows, listed only once there is something to report.
                names = names or list(latents.rows)
                owner_chunk, owner_use = owners[row].tolist()
                owner_uses = np.load(folders[owner_chunk] / USES_FILE, mmap_mode="r", allow_pickle=False)
                _, _, owner_source, owner_line = owner_uses[owner_use].tolist()
                owner = f"{results[owner_chunk]['sources'][owner_source]}:{owner_line}"
                reason = f"id {names[row]!r} is already used by {owner}"
                yield chunk, index, Problem(results[chunk]["sources"][source], line, "mismatch", reason)
    for key, row in latents.rows.items():
        if owners[row, 0] < 0:
            problem = Problem(str(latents.path), row + 1, "unused_latent", f"id {key!r} belongs to no document")
            yield len(folders), None, problem
