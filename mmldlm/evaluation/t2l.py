"""t2l: the latent found for a text beside its true one, and whether it finds it among all candidates; as a whole, and
by how much noise the text has to make up for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmldlm.data.nearest import directions
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import cosine, noise_levels, ranks_of_own, ratio


def latent_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Collective: t2l, on the encoder's own scale."""
    evaluation.progress.phase("latents from texts")
    store, count = evaluation.run.store, len(evaluation.ids)
    made = store.restore(evaluation.write("t2l", "own", count, evaluation.run.config.sampling).latents)
    found = closeness(evaluation, made)
    evaluation.progress.phase("latents from texts, by noise level")
    return found | {"by_t_latent": _by_level(evaluation)}


def closeness(evaluation: Evaluation, made: np.ndarray) -> dict[str, Any]:
    """Latents [n, M, C] on the encoder's scale beside the true ones of all documents at hand."""
    store, count, truth = evaluation.run.store, len(evaluation.ids), evaluation.raw_latents
    mean = np.broadcast_to(np.asarray(store.manifest.latent.mean, np.float32), truth.shape)
    other = store.restore(evaluation.latents["shuffled"])
    own = ratio(cosine(made, truth).astype(np.float64), np.ones(count))
    rank = ranks_of_own(directions(made) @ directions(truth).T)
    return {
        "cosine": own.value,
        "cosine_ci95": list(own.interval),
        "cosine_mean_latent": float(cosine(mean, truth).mean()),
        "cosine_shuffled": float(cosine(made, other).mean()),
        "recall_at_1": float((rank <= 1).mean()),
        "recall_at_10": float((rank <= 10).mean()),
        "recall_at_1_chance": 1 / count,
        "recall_at_10_chance": min(10, count) / count,
        "median_rank": float(np.median(rank)),
        "median_rank_chance": (count + 1) / 2,
        "candidates": count,
    }


@torch.no_grad()
def denoised(evaluation: Evaluation, condition: Condition) -> tuple[np.ndarray, np.ndarray]:
    """Collective: noise times [T, n], and float32 [T, n, M, C], on the encoder's own scale: what the network, given the
    texts, takes the latents to be that were noised so, in one pass.

    Each of the T = `times` draws takes its t_latent from a low-discrepancy grid over all documents; the same times and
    noise for every condition.
    """
    run, config = evaluation.run, evaluation.config
    count, process = len(evaluation.ids), run.objective.latent
    times, found = np.zeros((config.times, count)), np.zeros((config.times, *evaluation.raw_latents.shape))
    for draw, counts, batch in evaluation.draws(condition):
        noise = draw_noise(batch, config.seed, draw, count, mode_weights("t2l"))
        noised = run.objective.corrupt(batch, noise).to(run.device)
        _, predicted, *_ = run.model(*noised.inputs)
        if not counts:
            continue
        x0, _ = process.estimates(predicted.float(), noised.noised_latents, noised.t_latent)
        slots = batch.slots.numpy()
        times[draw, slots], found[draw, slots] = noise.t_latent.double(), x0.double().cpu()
    return evaluation.pooled(times), run.store.restore(evaluation.pooled(found))


def _by_level(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Rows of the draws with t_latent in [`t_from`, `t_to`).

    The control `_shuffled` has the latent of another document to find, beside the text.
    """
    store, truth = evaluation.run.store, evaluation.raw_latents
    t, made = denoised(evaluation, "own")
    _, misled = denoised(evaluation, "shuffled")
    mean = np.broadcast_to(np.asarray(store.manifest.latent.mean, np.float32), truth.shape)
    other, candidates = store.restore(evaluation.latents["shuffled"]), directions(truth).T
    similar = {
        "cosine": np.stack([cosine(latents, truth) for latents in made]),
        "cosine_shuffled": np.stack([cosine(latents, other) for latents in misled]),
        "cosine_mean_latent": np.tile(cosine(mean, truth), (len(t), 1)),
        "recall_at_1": np.stack([ranks_of_own(directions(latents) @ candidates) <= 1 for latents in made]),
    }
    return [
        {**row, **{name: _mean(values[inside]) for name, values in similar.items()}} for row, inside in noise_levels(t)
    ]


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None
