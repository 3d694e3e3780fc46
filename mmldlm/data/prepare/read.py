"""Stage `read`: cache the documents of a chunk, each with its split and its group."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.corpus import GROUPS_FILE, SPLITS_FILE, DocumentCacheWriter, assign_split, hash64
from mmldlm.data.prepare.dedup import exact_groups
from mmldlm.data.prepare.documents import Problem
from mmldlm.data.prepare.inputs import complete_documents
from mmldlm.data.prepare.job import Job
from mmldlm.data.prepare.latent_pairing import LatentUses, first_positions
from mmldlm.data.prepare.plan import chunk_documents
from mmldlm.data.prepare.readers.latents import POSITION
from mmldlm.data.prepare.report import DOCUMENTS, ProblemLog, StageProgress


def needs_counts(job: Job) -> bool:
    """Return whether latents belong to documents by position, so that reading a chunk takes the sizes of the others."""
    return job.config.latent_ids == POSITION


def count_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Count the documents and problems of a chunk."""
    documents = chunk_documents(job.plan.chunks[chunk], job.config)
    return {"count": sum(1 for _ in progress.track(documents, DOCUMENTS))}


def read_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Read a chunk into a document cache in `folder`, with the splits and groups of its documents.

    Return counts, the shapes of imported latents, and problems.
    """
    config, latents = job.config, job.latents
    splits, groups, uses = bytearray(), array("Q"), LatentUses()
    shapes: dict[tuple[int, ...], None] = {}  # a set in the order of insertion
    origins: Counter[str] = Counter()
    first_position = 0
    if latents and needs_counts(job):
        first_position = first_positions(latents, [result["count"] for result in job.results("count")])[chunk]
    with DocumentCacheWriter(folder) as cache, ProblemLog(config, folder, progress.reported) as problems:
        documents = chunk_documents(job.plan.chunks[chunk], config, progress.track)
        items = complete_documents(documents, config, latents, first_position)
        for item, row in progress.track(items, DOCUMENTS):
            # Problems that refer to a row are recorded too, or the row would count as unused.
            if row is not None:
                uses.add(row, -1 if isinstance(item, Problem) else len(cache), item)
            if isinstance(item, Problem):
                problems.add(item)
                continue
            group = exact_groups([item.text])[0]
            splits.append(assign_split(group, config))
            groups.append(hash64(group))
            cache.add(item)
            if item.latents is not None:
                shapes.setdefault(item.latents.shape)
            if config.corpus:
                origins[item.source.split("/")[0]] += 1
        result = {"documents": len(cache), "shapes": list(shapes), "origins": origins, **problems.result()}
    if latents:
        result.update(uses.save(folder))
    np.save(folder / SPLITS_FILE, np.frombuffer(splits, np.uint8), allow_pickle=False)
    np.save(folder / GROUPS_FILE, np.frombuffer(groups, np.uint64), allow_pickle=False)
    return result
