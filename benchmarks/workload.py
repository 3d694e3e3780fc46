"""Data to measure on: real tokens in samples of real lengths, the same for every variant.

The text is the embedded corpus, as one stream of tokens; the lengths are those of `data/lengths.json`, in an order of
their own: `documents`, `sentences`, or `full`, where every sample has the most tokens that there may be and padding
costs nothing.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.python_docs import read_python_docs
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import StoreWriter

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


def make_stores(folder: Path, kinds: tuple[Kind, ...], vocab_size: int, samples: int = 2048) -> dict[Kind, Path]:
    """A store for each of `kinds` in `folder`, of one tokenizer with `vocab_size` tokens; those there are taken."""
    paths = {kind: folder / f"{kind}-{vocab_size}-{samples}" for kind in kinds}
    missing = {kind: path for kind, path in paths.items() if not path.is_dir()}
    if not missing:
        return paths
    texts = [document.text for document in read_python_docs()]
    tokenizer = Tokenizer.train(texts, vocab_size)
    if tokenizer.vocab_size != vocab_size:
        raise SystemExit(f"the corpus has {tokenizer.vocab_size} tokens for a tokenizer, expected {vocab_size}")
    stream = np.fromiter(chain.from_iterable(tokenizer.encode_batch(texts)), np.int64)
    encoder = LsaEncoder.fit(texts[:4096], CHANNELS)
    vectors = encoder.encode(texts[:4096])
    vectors = vectors[np.isfinite(vectors).all(axis=(1, 2))]
    for kind, path in missing.items():
        _write(path, stream, vectors, tokenizer, encoder, lengths_of(kind, samples + 2 * HELD_OUT))
    return paths


def _write(
    path: Path, stream: np.ndarray, vectors: np.ndarray, tokenizer: Tokenizer, encoder: LsaEncoder, lengths: np.ndarray
) -> None:
    starts = np.random.default_rng(1).integers(0, len(stream) - lengths.max(), len(lengths))
    tokens = [stream[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    latents = vectors[np.arange(len(lengths)) % len(vectors)]
    with StoreWriter(path, tokenizer, encoder) as writer:
        parts = {"validation": slice(0, HELD_OUT), "test": slice(HELD_OUT, 2 * HELD_OUT)}
        for split, part in {**parts, "train": slice(2 * HELD_OUT, None)}.items():
            writer.add(split, tokens[part], latents[part], [5 * len(sample) for sample in tokens[part]])
        writer.finish(sources=[], options={}, problems={}, grouping={})
