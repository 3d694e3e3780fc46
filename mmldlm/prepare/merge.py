"""The last stages: the mean of the training latents, their spread around it, and all shards as one store."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.writer import Contents, error_prefix, latent_info, publish, squared_deviations, write_manifest
from mmldlm.prepare.job import Job
from mmldlm.prepare.report import (
    PROBLEMS_FILE,
    StageProgress,
    check_losses,
    check_problem_budget,
    loss_shares,
    sum_counts,
)
from mmldlm.utils.files import fsync


def latent_mean(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Return the mean [C] of the training latents of all chunks.

    It is a `DataError` if there are more problems than the options allow, or a split has no samples.
    """
    # This is the first stage that knows the problems of all encoded chunks.
    check_problem_budget(job.config, [*job.results("read"), job.result("fit"), *job.results("encode")])
    check_losses(job.config, sum_counts(job.results("encode"), "counts"))
    with error_prefix(job.out):
        return {"mean": _sum_contents(job).mean(job.encoder.latent_tokens).tolist()}


def measure_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Return the squared deviations of a chunk's training latents from the mean, summed by shard, and the largest."""
    mean = np.array(job.result("mean")["mean"])
    shards = _chunk_contents(job, chunk).shards["train"]
    squares, largest = squared_deviations(job.path("encode", chunk), shards, mean)
    return {"squares": squares, "largest": largest}


def merge(job: Job) -> None:
    """Join the shards of all chunks into one store, in order, and publish it.

    Finished tasks stay unchanged, so an interrupted merge can start over.
    """
    with job.temporary_folder("store") as folder:
        contents = _link_shards(job, folder)
        for name in ("tokenizer", "encoder"):
            shutil.copytree(job.path("fit") / name, folder / name)
        read, encode = ([job.path(stage, chunk) for chunk in job.chunks] for stage in ("read", "encode"))
        with (folder / PROBLEMS_FILE).open("wb") as file:
            for task in [*read, job.path("fit"), *encode]:
                file.write((task / PROBLEMS_FILE).read_bytes())
        measured = job.results("measure")
        squares = [square for result in measured for square in result["squares"]]
        largest = max(result["largest"] for result in measured)
        with error_prefix(job.out):
            latent = latent_info(contents, job.encoder.latent_tokens, squares, largest)
        losses = loss_shares(sum_counts(job.results("encode"), "counts"))
        dtype, provenance = job.config.latent_dtype, _provenance(job)
        write_manifest(folder, contents, latent, job.tokenizer, job.encoder, dtype, provenance, losses)
        publish(folder, job.out, job.staging / "replaced")


def _provenance(job: Job) -> dict[str, Any]:
    """Return the manifest's fields sources, options, problems and grouping."""
    read, fit, encode = job.results("read"), job.result("fit"), job.results("encode")
    problems, counts = sum_counts([*read, fit, *encode], "problems"), sum_counts(encode, "counts")
    problems.update({"cut_by_encoder": counts["cut"]} if counts["cut"] else {})
    origins = sum_counts(read, "origins")  # documents from each package of an embedded corpus
    return {
        "sources": [
            source | ({"documents": origins[source["package"]]} if "package" in source else {})
            for source in job.plan.sources
        ],
        "options": job.plan.options,
        "problems": {**dict(sorted(problems.items())), "over_length": counts["over_length"]},
        "grouping": fit["grouping"],
    }


def _chunk_contents(job: Job, chunk: int) -> Contents:
    """Load the contents of an encoded chunk's shards, which still have their names within the chunk."""
    return Contents.load(job.path("encode", chunk), job.result("encode", chunk)["contents"])


def _sum_contents(job: Job) -> Contents:
    """Return the contents of all chunks, added in order, because sums of floats depend on it."""
    total = _chunk_contents(job, 0)
    for chunk in job.chunks[1:]:
        total.add(_chunk_contents(job, chunk))
    return total


def _link_shards(job: Job, folder: Path) -> Contents:
    """Link the shards of all chunks into `folder` under their names in the store, and return their contents."""
    total = _sum_contents(job)
    num_linked: Counter[str] = Counter()
    for chunk in job.chunks:
        for split, shards in _chunk_contents(job, chunk).shards.items():
            for shard in shards:
                index = num_linked[split]
                name = f"{split}-{index:05d}"
                for suffix in shard.files:
                    source, path = job.path("encode", chunk) / f"{shard.name}.{suffix}", folder / f"{name}.{suffix}"
                    try:
                        # A link costs no second copy of the data and leaves the chunk's own file in place.
                        os.link(source, path)
                    except OSError:  # a file system without hard links
                        shutil.copyfile(source, path)
                        fsync(path)
                total.shards[split][index] = replace(shard, name=name)
                num_linked[split] += 1
    return total
