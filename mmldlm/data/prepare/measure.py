"""Stages `mean` and `measure`: the mean of the training latents, and the spread of the latents of a chunk around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.prepare.job import Job
from mmldlm.data.prepare.report import StageProgress, check_losses, check_problem_budget, sum_counts
from mmldlm.data.writer import Contents, error_prefix, squared_deviations


def chunk_contents(job: Job, chunk: int) -> Contents:
    """Load the contents of the shards of an encoded chunk, which still have the names of the chunk."""
    return Contents.load(job.path("encode", chunk), job.result("encode", chunk)["contents"])


def sum_contents(job: Job) -> Contents:
    """Return the contents of all chunks in their order, on which sums of floats depend."""
    total = chunk_contents(job, 0)
    for chunk in job.chunks[1:]:
        total.add(chunk_contents(job, chunk))
    return total


def latent_mean(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Return the mean [C] of the training latents of all chunks.

    More problems than the options allow, or a split without samples, are a `DataError`.
    """
    # The first stage that knows the problems of all encoded chunks.
    check_problem_budget(job.config, [*job.results("read"), job.result("fit"), *job.results("encode")])
    check_losses(job.config, sum_counts(job.results("encode")))
    total = sum_contents(job)
    with error_prefix(job.out):
        return {"mean": total.mean(job.encoder.latent_tokens).tolist()}


def measure_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Return the squared deviations of a chunk's training latents from the mean: by shard, and the largest."""
    mean = np.array(job.result("mean")["mean"])
    shards = chunk_contents(job, chunk).shards["train"]
    squares, largest = squared_deviations(job.path("encode", chunk), shards, mean)
    return {"squares": squares, "largest": largest}
