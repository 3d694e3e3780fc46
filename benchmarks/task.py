"""What every variant of the ladder does: a network of one size over the same samples, in one precision."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workload import Kind, batch_of, make_store
from mmldlm.batch import Batch
from mmldlm.config import RunConfig, load_config
from mmldlm.data.store import Split

TOKENIZER_VOCAB = 2560  # the corpus has no more than some thousands; a larger vocabulary is the network's alone
HEAD_WIDTH = 64
SETTINGS = (
    "train.steps=1000000",  # never reached
    "validation.every=0",  # not part of a step
    "checkpoint.every_steps=0",
)


@dataclass(frozen=True)
class Shape:
    width: int
    depth: int
    heads: int
    vocab_size: int
    batch: int  # samples
    positions: int  # the most tokens of a sample, to which old practice pads

    def store(self, folder: Path, kind: Kind) -> Path:
        return make_store(folder, kind, min(TOKENIZER_VOCAB, self.vocab_size), self.positions, self.vocab_size)


SHAPES = {
    # The shares of head and backbone are those of the large model, with its head width.
    "proportional": Shape(256, 8, 4, 2560, 8, 256),
    "brief": Shape(256, 4, 4, 30_522, 8, 256),
    "gpu": Shape(1024, 24, 16, 30_522, 16, 512),
    "tiny": Shape(64, 2, 1, 300, 4, 32),
}


@dataclass(frozen=True)
class Task:
    """JSON says all of it, so that a process of its own may do the same."""

    store: str
    width: int
    depth: int
    heads: int
    batch: int
    precision: str
    settings: tuple[str, ...] = ()  # key.sub=value of the run config, for all variants of ours

    def config(self, run_dir: Path | str, settings: tuple[str, ...] = ()) -> RunConfig:
        """The trainer's defaults but for the size, then `settings`."""
        given = (
            f"run.dir={run_dir}",
            f"data.path={self.store}",
            f"model={{width: {self.width}, depth: {self.depth}, num_heads: {self.heads}}}",
            f"train.global_batch_size={self.batch}",
            f"precision={self.precision}",
        )
        return load_config(None, [*given, *SETTINGS, *self.settings, *settings])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        found: dict[str, Any] = json.loads(text)
        return cls(**found | {"settings": tuple(found["settings"])})


class Feed:
    """Hands out micro-batches in turn, in place of the loader's order.

    On a CPU each is read from the store when it is asked for, as the loader's default does. Otherwise all are there
    before the first step, in page-locked memory, as they are where loader processes keep up.
    """

    def __init__(self, split: Split, rows: list[np.ndarray], device_type: str):
        self.split, self.rows = split, rows
        self.step = 0  # the number of the next step, which decides its micro-batch and its noise
        self._ready = [] if device_type == "cpu" else [batch_of(split, each).pin_memory() for each in rows]

    def batch(self) -> Batch:
        index = self.step % len(self.rows)
        return self._ready[index] if self._ready else batch_of(self.split, self.rows[index])

    def steps(self, *_: Any) -> Iterator[tuple[int, list[Batch]]]:
        """In place of `Loader.steps`."""
        while True:
            yield self.step, [self.batch()]


def heads_of(width: int) -> int:
    """Heads of 64 channels, as the shapes above and the reference have them."""
    return max(1, width // HEAD_WIDTH)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
