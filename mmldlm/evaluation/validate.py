"""Held-out losses on a fixed time grid and seed, during training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.loader import fixed_batches, permute
from mmldlm.data.mixture import shared_out
from mmldlm.data.store import Split, Store
from mmldlm.diffusion.noise import MODES, draw_noise, mode_weights, trained_modes
from mmldlm.diffusion.objective import Objective

if TYPE_CHECKING:
    from mmldlm.distributed.engine import Engine

MICRO_BATCH = 64
SEED = 20_260  # of times, masks and noise: every validation of every run sees the same
MOST_SHUFFLED = 1 << 20  # samples; of more, only those that are asked for are drawn
LEVELS_DRAWN = 30  # noise levels of a curve over t, at least: as many as TensorBoard's histograms have bins


def validation_ids(split: Split, count: int) -> list[int]:
    """A fixed draw, of several stores by their shares: neighbors in a store come from one source."""
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


@dataclass(frozen=True)
class HeldOut:
    """What a validation measured."""

    values: dict[str, float]  # validation/..., and quality/... where it follows from them
    levels: dict[str, list[float]]  # losses over the noise times, in fine steps from 0 to 1, by modality and mode


def validation_losses(
    objective: Objective, store: Store, ids: list[int], config: RunConfig, runtime: Engine
) -> HeldOut:
    """Collective: mean losses over `ids` of the validation split, every trained mode alike, whatever its share in
    training. Of several stores, those of each as well.

    Each rank takes its part of the micro-batches; noise is keyed by place, so the result does not depend
    on how many ranks there are.
    """
    finer = -(-LEVELS_DRAWN // objective.levels)
    objective = objective.plain(finer)
    split = store.split("validation")
    sums, counts = torch.zeros(2, len(split.sources), objective.size, dtype=torch.float64)
    trained = trained_modes(config.mode, config.mode_schedule)
    for step, mode in enumerate(MODES):
        if mode not in trained:
            continue
        weights = mode_weights(mode)
        for _, (source, batch), counted in runtime.local_items(list(_batches(split, ids))):
            noise = draw_noise(batch, SEED, step, len(ids), weights)
            noised = objective.corrupt(batch, noise)
            _, own = objective(runtime.eval_forward, noised.to(runtime.device), noised.counts.tolist())
            if counted:
                sums[source] += own.double().cpu()
                counts[source] += noised.counts
    sums, counts = runtime.sum(sums, "validation losses"), runtime.sum(counts, "validation counts")
    found = {"validation": objective.summary(sums.sum(0), counts.sum(0), finer)}
    if len(split.sources) > 1:
        for part, own_sums, own_counts in zip(split.sources, sums, counts, strict=True):
            if own_counts.sum() > 0:  # of each store without its noise levels, which are many
                found[f"validation/{part.name}"] = objective.summary(own_sums, own_counts, objective.levels)
    values = {
        name.replace("loss/", f"{prefix}/"): value
        for prefix, summary in found.items()
        for name, value in summary.items()
    }
    if objective.text.loss_kind == "elbo" and "l2t" in trained:
        values["quality/l2t_bits_per_token"] = values["validation/text_l2t"] / math.log(2)
    return HeldOut(values, objective.by_level(sums.sum(0), counts.sum(0)))
