"""Stores of random tokens and latents of given lengths, written in bulk: for what does not depend on the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models

from benchmarks.workload import CHANNELS, HELD_OUT
from mmldlm.data.encoders import LsaEncoder
from mmldlm.data.manifest import MANIFEST_NAME
from mmldlm.data.store_writer import StoreWriter
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.utils.files import write_atomically

AT_ONCE = 100_000  # samples


def random_store(folder: Path, lengths: np.ndarray, vocab_size: int = 2560, max_length: int | None = None) -> Path:
    """A store at `folder` whose training samples have `lengths` [n], one latent of 64 channels in float16 each.

    The longest sample that its manifest tells of is `max_length`, or else the longest that there is.
    """
    words = tokenizers.Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab_size - 2)}))
    tokenizer = Tokenizer(words)
    assert tokenizer.vocab_size == vocab_size
    draw = np.random.default_rng(0)
    projection = draw.standard_normal((CHANNELS, CHANNELS)).astype(np.float32)
    encoder = LsaEncoder([f"w{number}" for number in range(CHANNELS)], np.ones(CHANNELS, np.float32), projection, 0)
    with StoreWriter(folder, tokenizer, encoder, overwrite=True) as writer:
        for split, wanted in {"train": lengths, "validation": lengths[:HELD_OUT], "test": lengths[:HELD_OUT]}.items():
            for start in range(0, len(wanted), AT_ONCE):
                some = wanted[start : start + AT_ONCE]
                tokens = draw.integers(0, vocab_size - 2, int(some.sum()), dtype=writer.token_dtype)
                latents = draw.standard_normal((len(some), 1, CHANNELS), dtype=np.float32)
                writer.add(split, np.split(tokens, np.cumsum(some)[:-1]), latents, (5 * some).tolist())
        manifest = writer.finish(sources=[], options={}, problems={}, grouping={})
    if max_length is not None:
        write_atomically(folder / MANIFEST_NAME, replace(manifest, max_length=max_length).to_json())
    return folder
