"""Metrics of t2l: compare latents generated for texts with the true ones, and retrieve the true ones among all.

We measure full sampling, and single passes by noise bin.

Shape letters: n documents, T noise times per document, M latent tokens, C latent channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mmldlm.data.nearest import unit_vectors
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.evaluation.controls import ridge_latents
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import cosine, noise_bins, retrieval_ranks, share_with_interval, with_interval
from mmldlm.utils.intervals import ratio_of_sums


def latent_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Return the t2l metrics, on the encoder's own scale (collective)."""
    evaluation.progress.phase("latents from texts")
    store, count = evaluation.run.store, len(evaluation.ids)
    latents = store.restore(evaluation.generate("t2l", "own", count, evaluation.run.config.sampling).latents)
    metrics = latent_similarity_metrics(evaluation, latents)
    evaluation.progress.phase("latents from token counts")
    ridge = latent_similarity_metrics(evaluation, ridge_latents(evaluation))
    metrics |= {f"{key}_ridge": ridge[key] for key in ("cosine", "recall_at_1", "recall_at_10", "median_rank")}
    evaluation.progress.phase("latents from texts, by noise bin")
    return metrics | {"by_t_latent": _by_noise_bin(evaluation)}


def latent_similarity_metrics(evaluation: Evaluation, latents: np.ndarray) -> dict[str, Any]:
    """Compare latents [n, M, C] on the encoder's scale with all documents' true latents by cosine and retrieval."""
    store, count, truth = evaluation.run.store, len(evaluation.ids), evaluation.raw_latents
    mean = store.restore(evaluation.given_latents("mean"))
    other = store.restore(evaluation.latents["shuffled"])
    own = ratio_of_sums(cosine(latents, truth).astype(np.float64), np.ones(count))
    rank = retrieval_ranks(unit_vectors(latents) @ unit_vectors(truth).T)
    return {
        **with_interval("cosine", own),
        "cosine_mean_latent": float(cosine(mean, truth).mean()),
        "cosine_shuffled": float(cosine(latents, other).mean()),
        **share_with_interval("recall_at_1", rank <= 1),
        **share_with_interval("recall_at_10", rank <= 10),
        "recall_at_1_chance": 1 / count,
        "recall_at_10_chance": min(10, count) / count,
        "median_rank": float(np.median(rank)),
        "median_rank_chance": (count + 1) / 2,
        "candidates": count,
    }


@torch.no_grad()
def denoise_latents(evaluation: Evaluation, condition: Condition) -> tuple[np.ndarray, np.ndarray]:
    """Noise the latents of all documents and predict them in one pass, given the texts (collective).

    Each of the T = `times` draws takes its t_latent from a low-discrepancy grid over all documents. All conditions get
    the same times and noise.

    Returns:
        The noise times [T, n], and the predicted latents on the encoder's own scale, float32 [T, n, M, C].
    """
    run, config = evaluation.run, evaluation.config
    count, process = len(evaluation.ids), run.objective.latent
    times, latents = np.zeros((config.times, count)), np.zeros((config.times, *evaluation.raw_latents.shape))
    for draw, counted, batch in evaluation.draws(condition):
        # t2l pins t_text to 0, so the network sees the whole text. Noise is keyed by slot, not by the latent.
        noise = draw_noise(batch, config.seed, draw, count, mode_weights("t2l"))
        noised = run.objective.corrupt(batch, noise).to(run.device)
        _, predicted, *_ = run.model(*noised.inputs)
        if not counted:
            continue
        # Whatever the prediction type, we compare x0 with the true latent.
        x0, _ = process.estimates(predicted.float(), noised.noised_latents, noised.t_latent)
        slots = batch.slots.numpy()
        times[draw, slots], latents[draw, slots] = noise.t_latent.double(), x0.double().cpu()
    return evaluation.sum_over_ranks(times), run.store.restore(evaluation.sum_over_ranks(latents))


def _by_noise_bin(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return a row for each noise bin: the draws with t_latent in [`t_from`, `t_to`).

    In the baseline `_shuffled`, the network has to predict another document's noised latent, given this text.
    """
    store, truth = evaluation.run.store, evaluation.raw_latents
    t, denoised = denoise_latents(evaluation, "own")
    _, denoised_shuffled = denoise_latents(evaluation, "shuffled")
    mean = store.restore(evaluation.given_latents("mean"))
    other, candidates = store.restore(evaluation.latents["shuffled"]), unit_vectors(truth).T
    values_by_metric = {
        "cosine": np.stack([cosine(latents, truth) for latents in denoised]),
        "cosine_shuffled": np.stack([cosine(latents, other) for latents in denoised_shuffled]),
        "cosine_mean_latent": np.tile(cosine(mean, truth), (len(t), 1)),
        "recall_at_1": np.stack([retrieval_ranks(unit_vectors(latents) @ candidates) <= 1 for latents in denoised]),
    }
    rows = []
    for row, inside in noise_bins(t):
        for name, values in values_by_metric.items():
            row[name] = float(values[inside].mean(dtype=np.float64)) if inside.any() else None
        rows.append(row)
    return rows
