"""Held-out losses on a fixed time grid and seed, and held-out texts written from their latents, during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from mmldlm.config import RunConfig
from mmldlm.data.loader import fixed_batches
from mmldlm.data.shards import Split, Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights, trained_modes
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import generate

if TYPE_CHECKING:
    from mmldlm.runtime.engine import Runtime

MICRO_BATCH = 64
SEED = 20_260  # of times, masks and noise: every validation of every run sees the same


def validation_ids(split: Split, count: int) -> list[int]:
    """A fixed draw: neighbours in a store come from one source."""
    drawn = np.random.default_rng(SEED).permutation(len(split))
    return drawn[~np.isin(drawn, split.skipped)][:count].tolist()


def validation_losses(
    objective: Objective, store: Store, ids: list[int], config: RunConfig, runtime: Runtime
) -> dict[str, float]:
    """Mean losses over `ids` of the validation split, every trained mode alike, whatever its share in training.

    Each rank takes its part of the micro-batches; noise is keyed by place, so the result does not depend
    on how many ranks there are. Where a forward pass is collective, a rank that is out of batches goes through
    its last ones again, uncounted.
    """
    objective = objective.plain()
    sums = counts = torch.zeros(2 * len(MODES) + 1, dtype=torch.float64)
    trained = trained_modes(config.mode, config.mode_schedule)
    for step, mode in enumerate(MODES):
        if mode not in trained:
            continue
        weights = mode_weights(mode)
        batches = list(fixed_batches(store.split("validation"), ids, MICRO_BATCH))
        for place in range(runtime.rank, len(batches) + runtime.rank, runtime.world_size):
            counted = place < len(batches)
            if not counted and not runtime.shards_parameters:
                break
            batch = batches[min(place, len(batches) - 1)]
            noise = draw_noise(batch, SEED, step, len(ids), weights)
            noised = objective.corrupt(batch, noise)
            _, part = objective(runtime.forward_bare, noised.to(runtime.device), noised.counts.tolist())
            if counted:
                sums, counts = sums + part.double().cpu(), counts + noised.counts
    summary = objective.summary(runtime.sum(sums, "validation losses"), runtime.sum(counts, "validation counts"))
    return {name.replace("loss/", "validation/"): value for name, value in summary.items()}


def text_samples(
    objective: Objective,
    store: Store,
    tokenizer: Tokenizer,
    config: RunConfig,
    runtime: Runtime,
) -> list[dict[str, str]]:
    """A few held-out documents, each beside the text that the model writes from its latent."""
    split = store.split("validation")
    ids = validation_ids(split, config.validation.text_samples)
    (batch,) = fixed_batches(split, ids, len(ids))
    generation = generate(
        runtime.forward_bare,
        objective.text,
        objective.latent,
        "l2t",
        config.sampling,
        torch.Generator().manual_seed(SEED),
        batch.latents.to(runtime.device),
        batch.lengths,
    )
    references = [part.tolist() for part in batch.tokens.split(batch.lengths)]
    pairs = zip(tokenizer.decode_batch(references), tokenizer.decode_batch(generation.split()), strict=True)
    return [{"reference": reference, "generation": written} for reference, written in pairs]
