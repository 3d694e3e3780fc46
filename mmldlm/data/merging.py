"""The last stage, of one process: the shards of all lots become one store, in the order of the lots."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.data.fitting import fitted_encoder
from mmldlm.data.manifest import ShardInfo
from mmldlm.data.options import PrepareConfig
from mmldlm.data.plan import Plan
from mmldlm.data.reporting import FILE as PROBLEMS
from mmldlm.data.shard_writer import SPLITS, Contents, latent_info
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.workshop import Workshop
from mmldlm.data.writer import named, write_manifest


def contents_of(shop: Workshop, encoded: list[str]) -> Contents:
    """Of all these pieces together, whose shards have their own names still."""
    found = [Contents.load(shop.path(piece), shop.result(piece)["contents"]) for piece in encoded]
    total = found[0]
    for contents in found[1:]:
        total.add(contents)
    return total


def merge(
    config: PrepareConfig,
    plan: Plan,
    shop: Workshop,
    read: list[str],
    encoded: list[str],
    measured: list[str],
    folder: Path,
) -> None:
    """Make `folder` a store of what all pieces hold. May have been begun before: what is moved already is left there.

    DataError where all latents are equal.
    """
    folder.mkdir(exist_ok=True)
    shop.begin_merging()
    total = contents_of(shop, encoded)
    for split in SPLITS:
        total.shards[split] = []
    for piece in encoded:
        for split, shards in Contents.load(shop.path(piece), shop.result(piece)["contents"]).shards.items():
            for shard in shards:
                name = f"{split}-{len(total.shards[split]):05d}"
                _move(shop.path(piece), shard, folder, name)
                total.shards[split].append(replace(shard, name=name))
    for name in ("tokenizer", "encoder"):
        shutil.copytree(shop.path("fit") / name, folder / name, dirs_exist_ok=True)
    with (folder / PROBLEMS).open("wb") as file:
        for piece in [*read, "fit", *encoded]:
            with (shop.path(piece) / PROBLEMS).open("rb") as part:
                shutil.copyfileobj(part, file)
    tokenizer, encoder = Tokenizer.load(folder / "tokenizer"), fitted_encoder(config, folder)
    measures = [shop.result(piece) for piece in measured]
    squares = [square for measure in measures for square in measure["squares"]]
    largest = max(measure["largest"] for measure in measures)
    with named(Path(config.out)):
        latent = latent_info(total, encoder.latent_tokens, squares, largest)
    results = [shop.result(piece) for piece in [*read, "fit", *encoded]]
    described = {
        "sources": _sources(config, plan, [shop.result(piece) for piece in read]),
        "options": plan.options,
        "problems": {
            **dict(sorted(sum((Counter(result["problems"]) for result in results), Counter()).items())),
            "over_length": sum(shop.result(piece)["over_length"] for piece in encoded),
        },
        "grouping": shop.result("fit")["grouping"],
    }
    write_manifest(folder, total, latent, tokenizer, encoder, config.latent_dtype, described)


def _move(folder: Path, shard: ShardInfo, store: Path, name: str) -> None:
    for suffix in shard.files:
        path = folder / f"{shard.name}.{suffix}"
        if path.exists():
            path.rename(store / f"{name}.{suffix}")


def _sources(config: PrepareConfig, plan: Plan, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the plan; of the embedded corpus with how many documents each package gave."""
    if not config.corpus:
        return plan.sources
    origins = sum((Counter(result["origins"]) for result in results), Counter[str]())
    return [source | {"documents": origins[source["package"]]} for source in plan.sources]
