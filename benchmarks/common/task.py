"""`Task`: the network, batch and store to measure.

`make_store` writes real tokens in samples of real lengths. It cuts the embedded corpus, as one stream of tokens, by the
histograms of `data/lengths.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.common.store_writer import StoreWriter
from mmldlm.batch import Batch, BatchSize
from mmldlm.config import RunConfig, load_config
from mmldlm.data.batch_schedule import deal
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.loader import collate
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Split
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.prepare.documents import Document
from mmldlm.prepare.readers.python_docs import read_python_docs

Kind = Literal["documents", "sentences", "full"]
KINDS: tuple[Kind, ...] = ("documents", "sentences", "full")
MAX_LENGTH = 256
CHANNELS = 64
HELD_OUT = 64  # samples each for validation and test, which are not measured
TOKENIZER_VOCAB = 2560  # the corpus has some thousand words, so only the network can have a larger vocabulary
HEAD_WIDTH = 64
SETTINGS = (
    "train.steps=1000000",  # more than we ever take
    "validation.every=0",  # not part of a step
    "checkpoint.every_steps=0",
    "compile.scope=none",  # unless a variant compiles
)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def heads_of(width: int) -> int:
    """Return the number of heads with 64 channels. The shapes and the reference have such heads."""
    return max(1, width // HEAD_WIDTH)


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    vocab_size: int
    batch: int  # samples
    positions: int  # maximum tokens of a sample: the reference pads to this length
    latents: int = 0  # positions for latents: on a GPU, attention computes tiles of 128 rows, latents included

    def store(self, folder: Path, kind: Kind) -> Path:
        return make_store(
            folder, kind, min(TOKENIZER_VOCAB, self.vocab_size), self.positions - self.latents, self.vocab_size
        )


SHAPES = {
    # Head and backbone have the same shares as in the large model, and the same head width.
    "proportional": Shape(256, 8, 4, 2560, 8, 256),
    "brief": Shape(256, 4, 4, 30_522, 8, 256),
    "gpu": Shape(1024, 24, 16, 30_522, 16, 512, latents=1),
    "tiny": Shape(64, 2, 1, 300, 4, 32),
}


@dataclass(frozen=True)
class Task:
    """The task of a variant, in plain values, so that another process can open the same task."""

    store: str
    width: int
    depth: int
    heads: int
    batch: int
    precision: str
    settings: tuple[str, ...] = ()  # key.sub=value of the run config, for all variants of ours

    def config(self, run_dir: Path | str = "never-opened", settings: tuple[str, ...] = ()) -> RunConfig:
        """Return the trainer's defaults with the task's size, then `settings`."""
        given = (
            f"run.dir={run_dir}",
            f"data.path={self.store}",
            f"model={{width: {self.width}, depth: {self.depth}, num_heads: {self.heads}}}",
            f"train.global_batch_size={self.batch}",
            f"precision={self.precision}",
        )
        return load_config(None, [*given, *SETTINGS, *self.settings, *settings])

    def to_json(self) -> dict[str, Any]:
        """Return the task for a result, with only the name of the store."""
        return {**asdict(self), "store": Path(self.store).name, "settings": list(self.settings)}


class Feed:
    """Gives micro-batches in turn, in place of the loader.

    On a CPU, a micro-batch is read from the store on request, like the loader does by default. On a GPU, all are in
    memory before the first step, as if loader processes kept up.
    """

    def __init__(self, split: Split, rows: list[np.ndarray], device_type: str):
        self.split, self.rows = split, rows
        self.step = 0  # number of the next step: it decides micro-batch and noise
        self._ready = [] if device_type == "cpu" else [batch_of(split, samples) for samples in rows]

    def batch(self) -> Batch:
        index = self.step % len(self.rows)
        return self._ready[index] if self._ready else batch_of(self.split, self.rows[index])

    def steps(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yield steps without end, each with its micro-batch."""
        while True:
            yield self.step, [self.batch()]


# --- micro-batches --------------------------------------------------------------------------------


def batch_of(split: Split, samples: np.ndarray) -> Batch:
    """Collate the samples int64 [B] like the loader does for one process without accumulation."""
    size = BatchSize(len(samples), len(samples))
    (slots,) = deal(split.lengths[samples], size, 1, split.manifest.latent.tokens)
    return collate(split, samples[slots[:, 0]], slots[:, 0])


def typical_batches(order: SampleOrder, split: Split, size: int, count: int) -> list[np.ndarray]:
    """Sort an epoch's micro-batches by tokens, and return `count` evenly spaced ones as samples int64 [B] of `split`.

    The sample order sorts by length within windows, so consecutive batches are alike. Together, these micro-batches
    have the lengths of an epoch.
    """
    epoch = _epoch(order, split, size)
    ranks = (np.arange(count) + 0.5) / count * len(epoch)
    return [epoch[int(rank)] for rank in ranks]


def largest_batch(order: SampleOrder, split: Split, size: int) -> np.ndarray:
    """Return the micro-batch of an epoch with the most tokens."""
    return _epoch(order, split, size)[-1]


def _epoch(order: SampleOrder, split: Split, size: int) -> list[np.ndarray]:
    batches = [order.take(start, size) for start in range(0, len(order) - size + 1, size)]
    return sorted(batches, key=lambda samples: int(split.lengths[samples].sum()))


# --- stores ---------------------------------------------------------------------------------------


def lengths_of(kind: Kind, count: int, max_length: int = MAX_LENGTH, seed: int = 0) -> np.ndarray:
    """Draw sample lengths in tokens, int64 [count], from the histogram. For "full", all are `max_length`."""
    if kind == "full":
        return np.full(count, max_length)
    path = Path(__file__).parents[1] / "data" / "lengths.json"
    histogram = np.array(json.loads(path.read_text())[kind]["lengths"])
    scaled = histogram * max_length // MAX_LENGTH if kind == "documents" else histogram
    return np.random.default_rng(seed).choice(scaled, count).clip(1, max_length)


def make_store(
    folder: Path,
    kind: Kind,
    vocab_size: int,
    max_length: int = MAX_LENGTH,
    model_vocab_size: int | None = None,
    samples: int = 2048,
) -> Path:
    """Write a store of `samples` into `folder` unless it exists, and return its path.

    The tokenizer has `vocab_size` tokens. If the network needs more than the corpus provides, the manifest names a
    larger `model_vocab_size`. The manifest gives `max_length` as the longest sample, even if all are shorter.
    """
    vocab = model_vocab_size or vocab_size
    path = folder / f"{kind}-{vocab}-{max_length}-{samples}"
    if path.is_dir():
        return path
    texts = [document.text for document in read_python_docs() if isinstance(document, Document)]
    tokenizer = Tokenizer.train(texts, vocab_size)
    if tokenizer.vocab_size != vocab_size:
        raise SystemExit(f"the corpus has {tokenizer.vocab_size} tokens for a tokenizer, expected {vocab_size}")
    stream = np.fromiter(chain.from_iterable(tokenizer.encode_batch(texts)), np.int64)
    encoder = LsaEncoder.fit(texts[:4096], CHANNELS)
    vectors = encoder.encode(texts[:4096])
    vectors = vectors[np.isfinite(vectors).all(axis=(1, 2))]
    lengths = lengths_of(kind, samples + 2 * HELD_OUT, max_length)
    starts = np.random.default_rng(1).integers(0, len(stream) - lengths.max(), len(lengths))
    tokens = [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    latents = vectors[np.arange(len(lengths)) % len(vectors)]
    unfinished = path.with_name(f"{path.name}.new")
    with StoreWriter(unfinished, tokenizer, encoder, overwrite=True) as writer:
        parts = {"validation": slice(0, HELD_OUT), "test": slice(HELD_OUT, 2 * HELD_OUT)}
        for split, part in {**parts, "train": slice(2 * HELD_OUT, None)}.items():
            writer.add(split, tokens[part], latents[part], [5 * len(sample) for sample in tokens[part]])
        manifest = writer.finish(sources=[], options={}, problems={}, grouping={})
    described = replace(manifest, vocab_size=vocab, max_length=max_length)
    described.write(unfinished)
    return unfinished.rename(path)
