"""The last stage, of one process: the shards of all lots become one store, in the order of the lots."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.data.manifest import ShardInfo
from mmldlm.data.prepare.fit import fitted_encoder
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.plan import Plan
from mmldlm.data.prepare.report import FILE as PROBLEMS
from mmldlm.data.prepare.staging import Workshop
from mmldlm.data.shard_writer import Contents, latent_info
from mmldlm.data.store_writer import named, write_manifest
from mmldlm.data.tokenizer import Tokenizer


def contents_of(shop: Workshop, piece: str) -> Contents:
    """Of the shards of one lot, which have their own names still."""
    return Contents.load(shop.path(piece), shop.result(piece)["contents"])


def together(parts: Iterable[Contents]) -> Contents:
    """What all of them hold, in this order."""
    total, *rest = parts
    for contents in rest:
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
    numbers: Counter[str] = Counter()
    total = together([_moved(shop, piece, folder, numbers) for piece in encoded])
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
    of_read, of_fit, of_encoded = ([shop.result(piece) for piece in pieces] for pieces in (read, ["fit"], encoded))
    results = [*of_read, *of_fit, *of_encoded]
    described = {
        "sources": _sources(config, plan, of_read),
        "options": plan.options,
        "problems": {
            **dict(sorted(sum((Counter(result["problems"]) for result in results), Counter()).items())),
            "over_length": sum(result["over_length"] for result in of_encoded),
        },
        "grouping": of_fit[0]["grouping"],
    }
    write_manifest(folder, total, latent, tokenizer, encoder, config.latent_dtype, described)


def _moved(shop: Workshop, piece: str, store: Path, numbers: Counter[str]) -> Contents:
    """What a lot holds, its shards moved to the store by the names that they have there; `numbers` counts a split's."""
    contents = contents_of(shop, piece)
    for split, shards in contents.shards.items():
        for index, shard in enumerate(shards):
            name = f"{split}-{numbers[split]:05d}"
            _move(shop.path(piece), shard, store, name)
            shards[index] = replace(shard, name=name)
            numbers[split] += 1
    return contents


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
