"""Small synthetic corpora and stores, whole and damaged, for the tests."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.store_writer import StoreWriter
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.manifest import CHECKSUM_NAME, MANIFEST_NAME, checksum_line
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.prepare.documents import SUFFIXES, Columns, Document, Format, Problem
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.readers.text import read_text, text_parts
from mmldlm.utils.files import file_info

TOPICS = {
    "garden": "rose tulip soil water seed bloom leaf root prune harvest".split(),  # noqa: SIM905
    "ocean": "wave tide salt reef whale coral current shore depth sail".split(),  # noqa: SIM905
    "kitchen": "flour oven knife butter simmer roast spoon recipe salt taste".split(),  # noqa: SIM905
    "music": "chord tempo violin drum melody rhythm choir tune bass note".split(),  # noqa: SIM905
}


def write_corpus(path: Path, documents: int = 600, seed: int = 0) -> Path:
    """One document a line, of unequal length, each about one topic."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        words = TOPICS[draw.choice(sorted(TOPICS))]
        length = draw.choice([4, 6, 9, 15, 25])
        lines.append("The " + " ".join(draw.choice([*words, "the", "of", "and"]) for _ in range(length)) + ".")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def small_config(out: Path, *inputs: Path, **options: object) -> PrepareConfig:
    values: dict = {"vocab_size": 300, "channels": 8, "validation_fraction": 0.1, "test_fraction": 0.1, **options}
    return PrepareConfig(str(out), tuple(map(str, inputs)), **values)


def read_file(
    path: Path, format: Format | None = None, field: str = "text", key_field: str | None = None
) -> Iterator[Document | Problem]:
    """Yield the documents and problems of one text file, by default in the format of its suffix."""
    format = format or SUFFIXES[path.suffix]
    for part in text_parts(str(path), path.stat().st_size, format):
        yield from read_text(part, field, format, Columns(key=key_field))


def write_store(path: Path, latent_dtype: str = "float32", tokens: int = 4) -> dict[str, list]:
    """A store of random samples in several shards; returns what was written."""
    random = np.random.default_rng(0)
    encoder = LsaEncoder.fit(["one two three", "four five one", "two five six", "six seven"], 4)
    encoder.latent_tokens = tokens
    written: dict[str, list] = {"train": [], "validation": [], "test": []}
    with StoreWriter(path, Tokenizer.characters(), encoder, latent_dtype, shard_samples=7) as writer:
        for split, count in [("train", 40), ("validation", 7), ("test", 3)]:
            samples = [random.integers(0, 27, random.integers(1, 30)) for _ in range(count)]
            latents = (random.normal(size=(count, tokens, 4)) * 3 + 5).astype(np.float32)
            for start in range(0, count, 9):
                part = slice(start, start + 9)
                writer.add(split, samples[part], latents[part], [len(sample) for sample in samples[part]])
            written[split] = list(zip(samples, latents, strict=True))
        writer.finish([], {}, {}, {})
    return written


def overwrite_value(store: Path, name: str, place: object, value: float) -> None:
    """Set `NAME.npy[place]` of a store and update its hash in the manifest."""
    path = store / f"{name}.npy"
    array = np.load(path)
    array[place] = value
    np.save(path, array)
    manifest = json.loads((store / MANIFEST_NAME).read_text())
    shard_name, _, kind = name.partition(".")
    shards = manifest["splits"][shard_name.rpartition("-")[0]]["shards"]
    (shard,) = (shard for shard in shards if shard["name"] == shard_name)
    shard["files"][f"{kind}.npy"] = vars(file_info(path))
    write_manifest(store, manifest)


def write_manifest(store: Path, content: dict[str, Any]) -> None:
    """Write an edited manifest with its checksum, as whoever made the store could have."""
    text = json.dumps(content)
    (store / MANIFEST_NAME).write_text(text)
    (store / CHECKSUM_NAME).write_text(checksum_line(hashlib.sha256(text.encode()).hexdigest()))


def flip_bit(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
