"""Stage `merge`, one task for all chunks: join their shards into one store, in order, and publish it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.data.prepare.job import Job
from mmldlm.data.prepare.measure import chunk_contents, sum_contents
from mmldlm.data.prepare.report import PROBLEMS_FILE, loss_shares, sum_counts
from mmldlm.data.writer import Contents, error_prefix, latent_info, publish, write_manifest
from mmldlm.utils.files import fsync


def merge(job: Job) -> None:
    """Make the store of a job whose other stages are finished. An interrupted merge starts over."""
    # No finished task is changed, so an interrupted merge can start over.
    with job.temporary_folder("store") as folder:
        contents = _link_shards(job, folder)
        for name in ("tokenizer", "encoder"):
            shutil.copytree(job.path("fit") / name, folder / name)
        with (folder / PROBLEMS_FILE).open("wb") as file:
            for task in _reporting_tasks(job):
                with (task / PROBLEMS_FILE).open("rb") as part:
                    shutil.copyfileobj(part, file)
        measured = job.results("measure")
        squares = [square for result in measured for square in result["squares"]]
        largest = max(result["largest"] for result in measured)
        with error_prefix(job.out):
            latent = latent_info(contents, job.encoder.latent_tokens, squares, largest)
        losses = loss_shares(sum_counts(job.results("encode")))
        dtype, provenance = job.config.latent_dtype, _provenance(job)
        write_manifest(folder, contents, latent, job.tokenizer, job.encoder, dtype, provenance, losses)
        publish(folder, job.out, job.staging / "replaced")


def _reporting_tasks(job: Job) -> list[Path]:
    """Return the folders of the tasks that report problems, in order."""
    read, encode = ([job.path(stage, chunk) for chunk in job.chunks] for stage in ("read", "encode"))
    return [*read, job.path("fit"), *encode]


def _provenance(job: Job) -> dict[str, Any]:
    """Return the manifest's fields sources, options, problems and grouping."""
    read, fit, encode = job.results("read"), job.result("fit"), job.results("encode")
    problems = sum((Counter(result["problems"]) for result in [*read, fit, *encode]), Counter[str]())
    sources = job.plan.sources
    if job.config.corpus:  # with the number of documents from each package
        origins = sum((Counter(result["origins"]) for result in read), Counter[str]())
        sources = [
            source | ({"documents": origins[source["package"]]} if "package" in source else {}) for source in sources
        ]
    return {
        "sources": sources,
        "options": job.plan.options,
        "problems": {**dict(sorted(problems.items())), "over_length": sum_counts(encode)["over_length"]},
        "grouping": fit["grouping"],
    }


def _link_shards(job: Job, folder: Path) -> Contents:
    """Give the shards of all chunks their names in the store, as hard links in `folder`; return their contents."""
    total = sum_contents(job)
    num_linked: Counter[str] = Counter()
    for chunk in job.chunks:
        for split, shards in chunk_contents(job, chunk).shards.items():
            for shard in shards:
                index = num_linked[split]
                name = f"{split}-{index:05d}"
                for suffix in shard.files:
                    _link(job.path("encode", chunk) / f"{shard.name}.{suffix}", folder / f"{name}.{suffix}")
                total.shards[split][index] = replace(shard, name=name)
                num_linked[split] += 1
    return total


def _link(source: Path, path: Path) -> None:
    try:
        # A link costs no second copy of the data and leaves the chunk's own file in place.
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)
        fsync(path)
