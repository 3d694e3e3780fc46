"""Stores that can be mixed, and stores of very many samples that take little disk space."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.store_writer import StoreWriter
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME, Manifest, ShardInfo
from mmldlm.data.tokenizer import Tokenizer
from tests.helpers.sample_corpus import write_manifest


def encoder() -> LsaEncoder:
    """The same for all stores: 4 channels."""
    return LsaEncoder.fit(["one two three", "four five one", "two five six", "six seven"], 4)


def random_letters_store(
    path: Path, samples: int, seed: int, center: float = 0.0, spread: float = 1.0, longest: int = 20, shard: int = 50
) -> Path:
    """A store of `samples` for training, 24 for validation, 8 for test, of 1 to `longest` random letters each."""
    draw = np.random.default_rng(seed)
    with StoreWriter(path, Tokenizer.characters(), encoder(), "float32", shard_samples=shard) as writer:
        for split, count in [("train", samples), ("validation", 24), ("test", 8)]:
            tokens = [draw.integers(0, 27, draw.integers(1, longest + 1)) for _ in range(count)]
            latents = (draw.normal(size=(count, 1, 4)) * spread + center).astype(np.float32)
            writer.add(split, tokens, latents, [len(sample) for sample in tokens])
        writer.finish([], {}, {}, {})
    return path


def change_manifest(store: Path, **values: Any) -> None:
    """Set `group__key` or `key` in the manifest of a store."""
    result = json.loads((store / MANIFEST_NAME).read_text())
    for key, value in values.items():
        *groups, leaf = key.split("__")
        place = result
        for group in groups:
            place = place[group]
        place[leaf] = value
    write_manifest(store, result)


def many_shards_store(path: Path, shards: int, samples: int) -> Path:
    """A store of `shards` times the same training shard of `samples`."""
    one = path.with_name(f"{path.name}-one")
    return linked_shards_store(random_letters_store(one, samples, seed=1, longest=8, shard=samples), path, shards)


def linked_shards_store(one: Path, path: Path, shards: int) -> Path:
    """A store with the only training shard of the store `one` under `shards` names: all are the same files."""
    shutil.copytree(one, path, copy_function=os.link)
    manifest = Manifest.read(path)
    train = manifest.splits["train"]
    (first,) = train.shards
    infos = [first]
    for number in range(1, shards):
        infos.append(ShardInfo(f"train-{number:05}", first.samples, first.tokens, first.files))
        for suffix in first.files:
            os.link(path / f"{first.name}.{suffix}", path / f"{infos[-1].name}.{suffix}")
    totals = {name: shards * getattr(train, name) for name in ("samples", "tokens", "characters")}
    many = replace(manifest, splits={**manifest.splits, "train": replace(train, **totals, shards=tuple(infos))})
    (path / MANIFEST_NAME).unlink()
    (path / CHECKSUM_NAME).unlink()
    many.write(path)
    return path
