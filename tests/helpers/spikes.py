"""Garbage planted in the samples of a store, so that the steps that draw them have a spike."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from tests.helpers.tampering import update_store_manifest

# Latents that are far too long raise losses that depend on their length, where they are predicted.
SPIKY = """
run: {{dir: {run}, seed: 3}}
data: {{path: {store}}}
model: {{depth: 2, width: 32, num_heads: 2, conditioning_width: 32, modulation_rank: 8}}
mode: {{t2l: 0.5, joint: 0.5}}
loss: {{latent: mse}}
optim: {{lr: 1e-3}}
train: {{steps: 40, global_batch_size: 8}}
guard: {{grad_norm_spike: 10, max_consecutive: 100}}
log: {{every: 5, tensorboard: false}}
validation: {{every: 0}}
checkpoint: {{every_steps: 10, keep_last: 100}}
distributed: {{timeout_s: 120}}
"""


def spoil(store: Path, samples: Sequence[int], factor: float = 1e3) -> None:
    path = store / "train-00000.latents.npy"
    latents = np.load(path)
    latents[list(samples)] = (latents[list(samples)].astype(np.float32) * factor).astype(latents.dtype)
    assert np.isfinite(latents).all()
    np.save(path, latents)
    update_store_manifest(store, path)


def spoiled_copy(store: Path, folder: Path, samples: Sequence[int], factor: float = 1e3) -> Path:
    shutil.copytree(store, folder / "own")
    spoil(folder / "own", samples, factor)
    return folder / "own"


def drawn_at(store: Path, step: int, seed: int = 3, size: int = 8) -> list[int]:
    """The samples of a step, counted from 1."""
    split = Store.open(store).split("train")
    return SampleOrder(split.lengths, seed).take((step - 1) * size, size).tolist()
