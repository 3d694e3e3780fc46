"""Last stage of a preparation, run by one process: join the shards of all chunks into one store, in order."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.data.manifest import ShardInfo
from mmldlm.data.prepare.fit import load_fitted_encoder
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Plan
from mmldlm.data.prepare.report import PROBLEMS_FILE
from mmldlm.data.prepare.staging import Workshop
from mmldlm.data.shard_writer import Contents, latent_info
from mmldlm.data.store_writer import error_prefix, write_manifest
from mmldlm.data.tokenizer import Tokenizer


def load_contents(staging: Workshop, task: str) -> Contents:
    """Load the contents of one chunk's shards, which still have the names of the chunk."""
    return Contents.load(staging.path(task), staging.result(task)["contents"])


def concat_contents(chunks: Iterable[Contents]) -> Contents:
    """Return the contents of all chunks in this order; the first argument is modified."""
    total, *rest = chunks
    for contents in rest:
        total.add(contents)
    return total


def merge(
    config: PrepareConfig,
    plan: Plan,
    staging: Workshop,
    read_tasks: list[str],
    encode_tasks: list[str],
    measure_tasks: list[str],
    folder: Path,
) -> None:
    """Make `folder` a store of the shards of all chunks.

    Continues a merge that was interrupted: shards that have been moved already stay in `folder`.

    Args:
        staging: The finished tasks.
        read_tasks: Names of the tasks that read, in the order of the chunks.
        encode_tasks: Names of the tasks that encode, in the same order.
        measure_tasks: Names of the tasks that measure, in the same order.
        folder: The folder of the store, which need not exist.

    Raises:
        DataError: All latents are equal.
    """
    folder.mkdir(exist_ok=True)
    staging.begin_merging()
    num_shards: Counter[str] = Counter()
    total = concat_contents([_move_shards(staging, task, folder, num_shards) for task in encode_tasks])
    for name in ("tokenizer", "encoder"):
        shutil.copytree(staging.path("fit") / name, folder / name, dirs_exist_ok=True)
    with (folder / PROBLEMS_FILE).open("wb") as file:
        for task in [*read_tasks, "fit", *encode_tasks]:
            with (staging.path(task) / PROBLEMS_FILE).open("rb") as part:
                shutil.copyfileobj(part, file)
    tokenizer, encoder = Tokenizer.load(folder / "tokenizer"), load_fitted_encoder(config, folder)
    measure_results = [staging.result(task) for task in measure_tasks]
    squares = [square for result in measure_results for square in result["squares"]]
    largest = max(result["largest"] for result in measure_results)
    with error_prefix(Path(config.out)):
        latent = latent_info(total, encoder.latent_tokens, squares, largest)
    read_results, fit_results, encode_results = (
        [staging.result(task) for task in tasks] for tasks in (read_tasks, ["fit"], encode_tasks)
    )
    results = [*read_results, *fit_results, *encode_results]
    provenance = {
        "sources": _sources(config, plan, read_results),
        "options": plan.options,
        "problems": {
            **dict(sorted(sum((Counter(result["problems"]) for result in results), Counter()).items())),
            "over_length": sum(result["over_length"] for result in encode_results),
        },
        "grouping": fit_results[0]["grouping"],
    }
    write_manifest(folder, total, latent, tokenizer, encoder, config.latent_dtype, provenance)


def _move_shards(staging: Workshop, task: str, store: Path, num_shards: Counter[str]) -> Contents:
    """Move the shards of a chunk to the store and return its contents; `num_shards` counts the shards by split."""
    contents = load_contents(staging, task)
    for split, shards in contents.shards.items():
        for index, shard in enumerate(shards):
            name = f"{split}-{num_shards[split]:05d}"
            _move_shard(staging.path(task), shard, store, name)
            shards[index] = replace(shard, name=name)
            num_shards[split] += 1
    return contents


def _move_shard(folder: Path, shard: ShardInfo, store: Path, name: str) -> None:
    for suffix in shard.files:
        path = folder / f"{shard.name}.{suffix}"
        if path.exists():  # else it was moved before an interruption
            path.rename(store / f"{name}.{suffix}")


def _sources(config: PrepareConfig, plan: Plan, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources of the plan; for an embedded corpus, with the number of documents from each package."""
    if not config.corpus:
        return plan.sources
    origins = sum((Counter(result["origins"]) for result in results), Counter[str]())
    return [source | {"documents": origins[source["package"]]} for source in plan.sources]
