"""Data to measure on: real tokens in samples of real lengths, the same for every variant.

The text is the embedded corpus, as one stream of tokens; the lengths are those of `data/lengths.json`, in an order of
their own: `documents`, `sentences`, or `full`, where every sample has the most tokens that there may be and padding
costs nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from mmldlm.batch import Batch
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.loader import assign_slots, collate
from mmldlm.data.manifest import MANIFEST_NAME
from mmldlm.data.prepare.documents import Document
from mmldlm.data.prepare.readers.python_docs import read_python_docs
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Split
from mmldlm.data.store_writer import StoreWriter
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.utils.files import write_atomically

Kind = Literal["documents", "sentences", "full"]
KINDS: tuple[Kind, ...] = ("documents", "sentences", "full")
MAX_LENGTH = 256
CHANNELS = 64
HELD_OUT = 64  # samples of validation and of test, of which nothing is measured


def lengths_of(kind: Kind, count: int, max_length: int = MAX_LENGTH, seed: int = 0) -> np.ndarray:
    """int64 [count]: lengths of samples in tokens, drawn from the histogram."""
    if kind == "full":
        return np.full(count, max_length)
    histogram = json.loads((Path(__file__).parent / "data" / "lengths.json").read_text())[kind]["lengths"]
    scaled = np.array(histogram) * max_length // MAX_LENGTH if kind == "documents" else np.array(histogram)
    return np.random.default_rng(seed).choice(scaled, count).clip(1, max_length)


def make_store(
    folder: Path,
    kind: Kind,
    vocab_size: int,
    max_length: int = MAX_LENGTH,
    model_vocab_size: int | None = None,
    samples: int = 2048,
) -> Path:
    """A store of `samples` in `folder`; one that is there is taken.

    The tokenizer has `vocab_size` tokens. A network with more, which the corpus is too small for, is had by a larger
    `model_vocab_size` in the manifest; the manifest's longest sample is `max_length`, whichever the longest is.
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
    written = path.with_name(f"{path.name}.new")
    with StoreWriter(written, tokenizer, encoder, overwrite=True) as writer:
        parts = {"validation": slice(0, HELD_OUT), "test": slice(HELD_OUT, 2 * HELD_OUT)}
        for split, part in {**parts, "train": slice(2 * HELD_OUT, None)}.items():
            writer.add(split, tokens[part], latents[part], [5 * len(sample) for sample in tokens[part]])
        manifest = writer.finish(sources=[], options={}, problems={}, grouping={})
    described = replace(manifest, vocab_size=vocab, max_length=max_length)
    write_atomically(written / MANIFEST_NAME, described.to_json())
    return written.rename(path)


def typical_batches(order: SampleOrder, split: Split, size: int, count: int) -> list[np.ndarray]:
    """`count` micro-batches of `size`, rows int64 [B] of `split`, at evenly spaced ranks of an epoch's by tokens.

    Neighboring batches of the order are alike: it sorts by length. These together have an epoch's own lengths.
    """
    epoch = _epoch(order, split, size)
    ranks = (np.arange(count) + 0.5) / count * len(epoch)
    return [epoch[int(rank)] for rank in ranks]


def largest_batch(order: SampleOrder, split: Split, size: int) -> np.ndarray:
    """The micro-batch of an epoch with the most tokens."""
    return _epoch(order, split, size)[-1]


def _epoch(order: SampleOrder, split: Split, size: int) -> list[np.ndarray]:
    batches = [order.take(start, size) for start in range(0, len(order) - size + 1, size)]
    return sorted(batches, key=lambda samples: int(split.lengths[samples].sum()))


def batch_of(split: Split, samples: np.ndarray) -> Batch:
    """The samples int64 [B] as the loader gives them to one process without accumulation."""
    (slots,) = assign_slots(split.lengths[samples], len(samples), rank=0, world_size=1)
    return collate(split, samples[slots], slots)
