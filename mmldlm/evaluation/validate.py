"""Held-out losses during training, with fixed noise times and a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.loader import fixed_batches
from mmldlm.data.mixture import samples_per_source
from mmldlm.data.sampler import permute
from mmldlm.data.store import Split, Store
from mmldlm.diffusion.likelihood import BOUND_SAMPLER
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights
from mmldlm.diffusion.objective import Objective

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

MICRO_BATCH = 64
SEED = 20_260  # seed of times, masks and noise: the same in every validation of every run
MAX_SHUFFLED = 1 << 20  # a split with more samples is not shuffled as a whole
MIN_CURVE_BINS = 30  # a loss curve over t has at least this many noise bins, as many as TensorBoard's histograms


def validation_ids(split: Split, count: int) -> list[int]:
    """Return the indices of a fixed draw of `count` samples. In a mixture, each store contributes by its share.

    The samples are drawn at random, because neighbors in a store come from one source.
    """
    ids: list[int] = []
    for (_, first, stop), share in zip(split.source_ranges(), samples_per_source(count, split), strict=True):
        skipped = split.skipped_in(first, stop)
        drawn = first + _shuffled(stop - first, share + len(skipped))
        ids += drawn[~np.isin(drawn, skipped)][:share].tolist()
    return ids


def _shuffled(n: int, count: int) -> np.ndarray:
    """Return range(n) in a fixed random order. If n is large, return only the first `count` elements."""
    if n <= MAX_SHUFFLED:
        return np.random.default_rng(SEED).permutation(n)
    return permute(np.arange(min(n, count)), n, SEED, 0)


def _batches(split: Split, ids: Sequence[int]) -> Iterator[tuple[int, Batch]]:
    """Yield (source index, micro-batch) for the samples. A micro-batch has one source, and slots index `ids`."""
    rows = np.asarray(ids, np.int64)
    sources = split.source_of(rows)
    for source in range(len(split.sources)):
        indices = np.flatnonzero(sources == source)
        for batch in fixed_batches(split, rows[indices], MICRO_BATCH):
            # Noise is keyed by the index in `ids`, not by the index within the source.
            yield source, replace(batch, slots=torch.from_numpy(indices)[batch.slots])


@dataclass(frozen=True)
class ValidationResult:
    """The results of one validation."""

    values: dict[str, float]  # validation/..., and quality/... derived from them
    bin_losses: dict[str, list[float]]  # losses in fine noise bins from 0 to 1, by modality and mode


def validation_losses(
    objective: Objective, store: Store, ids: list[int], config: RunConfig, engine: Engine
) -> ValidationResult:
    """Compute mean losses over samples of the validation split, and for a mixture also of each store (collective).

    All trained modes have the same weight, whatever their shares in training. Each rank computes its part of the
    micro-batches. Noise is keyed by the index in `ids`, so the result does not depend on the number of ranks.
    """
    # Curves need finer bins than the logged scalars. For these, `summary` merges `refine` bins again.
    refine = -(-MIN_CURVE_BINS // objective.stats.num_noise_bins)
    objective = objective.for_validation(refine)
    split = store.split("validation")
    sums, counts = torch.zeros(2, len(split.sources), objective.stats.size, dtype=torch.float64)
    trained = config.trained_modes
    # The index of the mode takes the place of the step: a mode's noise does not depend on which others are trained.
    for step, mode in enumerate(MODES):
        if mode not in trained:
            continue
        weights = mode_weights(mode)
        for _, (source, batch), counted in engine.local_items(list(_batches(split, ids))):
            noise = draw_noise(batch, SEED, step, len(ids), weights, BOUND_SAMPLER)
            noised = objective.corrupt(batch, noise)
            _, batch_sums = objective(engine.eval_forward, noised.to(engine.device), noised.counts.tolist())
            if counted:
                sums[source] += batch_sums.double().cpu()
                counts[source] += noised.counts
    sums, counts = engine.sum(sums, "validation losses"), engine.sum(counts, "validation counts")
    summaries = {"validation": objective.stats.summary(sums.sum(0), counts.sum(0), refine)}
    if len(split.sources) > 1:
        for source_info, source_sums, source_counts in zip(split.sources, sums, counts, strict=True):
            if source_counts.sum() > 0:  # leave out the noise bins: there would be many for each store
                summary = objective.stats.summary(source_sums, source_counts, objective.stats.num_noise_bins)
                summaries[f"validation/{source_info.name}"] = summary
    values = {
        name.replace("loss/", f"{prefix}/"): value
        for prefix, summary in summaries.items()
        for name, value in summary.items()
    }
    if "l2t" in trained:
        values["quality/l2t_bits_per_token"] = values["validation/text_l2t"] / math.log(2)
    return ValidationResult(values, objective.stats.by_noise_bin(sums.sum(0), counts.sum(0)))
