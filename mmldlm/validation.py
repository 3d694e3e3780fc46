"""Held-out losses on a fixed time grid and seed, and held-out texts written from their latents, during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.loader import fixed_batches, permute
from mmldlm.data.mixture import shared_out
from mmldlm.data.shards import Split, Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights, trained_modes
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import generate

if TYPE_CHECKING:
    from mmldlm.runtime.engine import Runtime

MICRO_BATCH = 64
SEED = 20_260  # of times, masks and noise: every validation of every run sees the same
MOST_SHUFFLED = 1 << 20  # samples; of more, only those that are asked for are drawn


def validation_ids(split: Split, count: int) -> list[int]:
    """A fixed draw, of several stores by their shares: neighbours in a store come from one source."""
    found: list[int] = []
    for (_, first, stop), share in zip(split.parts(), shared_out(count, split), strict=True):
        skipped = split.skipped_in(first, stop)
        drawn = first + _shuffled(stop - first, share + len(skipped))
        found += drawn[~np.isin(drawn, skipped)][:share].tolist()
    return found


def _shuffled(n: int, count: int) -> np.ndarray:
    """At least the first `count`, or all, of range(n) in a fixed order."""
    if n <= MOST_SHUFFLED:
        return np.random.default_rng(SEED).permutation(n)
    return permute(np.arange(min(n, count)), n, SEED, 0)


def _batches(split: Split, ids: Sequence[int]) -> Iterator[tuple[int, Batch]]:
    """The samples `ids` in micro-batches, each of one source, whose number is given too; slots are places in `ids`."""
    rows = np.asarray(ids, np.int64)
    of = split.source_of(rows)
    for number in range(len(split.sources)):
        places = np.flatnonzero(of == number)
        for batch in fixed_batches(split, rows[places], MICRO_BATCH):
            yield number, replace(batch, slots=torch.from_numpy(places)[batch.slots])


def validation_losses(
    objective: Objective, store: Store, ids: list[int], config: RunConfig, runtime: Runtime
) -> dict[str, float]:
    """Mean losses over `ids` of the validation split, every trained mode alike, whatever its share in training.

    Of several stores, those of each as well.

    Each rank takes its part of the micro-batches; noise is keyed by place, so the result does not depend
    on how many ranks there are. Where a forward pass is collective, a rank that is out of batches goes through
    its last ones again, uncounted.
    """
    objective = objective.plain()
    split = store.split("validation")
    sums, counts = torch.zeros(2, len(split.sources), 2 * len(MODES) + 1, dtype=torch.float64)
    trained = trained_modes(config.mode, config.mode_schedule)
    for step, mode in enumerate(MODES):
        if mode not in trained:
            continue
        weights = mode_weights(mode)
        batches = list(_batches(split, ids))
        for place in range(runtime.rank, len(batches) + runtime.rank, runtime.world_size):
            counted = place < len(batches)
            if not counted and not runtime.shards_parameters:
                break
            source, batch = batches[min(place, len(batches) - 1)]
            noise = draw_noise(batch, SEED, step, len(ids), weights)
            noised = objective.corrupt(batch, noise)
            _, part = objective(runtime.forward_bare, noised.to(runtime.device), noised.counts.tolist())
            if counted:
                sums[source] += part.double().cpu()
                counts[source] += noised.counts
    sums, counts = runtime.sum(sums, "validation losses"), runtime.sum(counts, "validation counts")
    found = {"validation": objective.summary(sums.sum(0), counts.sum(0))}
    if len(split.sources) > 1:
        parts = zip(split.sources, sums, counts, strict=True)
        found |= {f"validation/{source.name}": objective.summary(*own) for source, *own in parts if own[1].sum() > 0}
    return {
        name.replace("loss/", f"{prefix}/"): value
        for prefix, summary in found.items()
        for name, value in summary.items()
    }


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
