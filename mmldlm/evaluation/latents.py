"""t2l: the latent found for a text beside its true one, and whether it finds it among all candidates."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmldlm.data.neighbours import directions
from mmldlm.evaluation.documents import Evaluation, Progress
from mmldlm.evaluation.statistics import cosine, ranks_of_own, ratio


def latent_metrics(evaluation: Evaluation, progress: Progress) -> dict[str, Any]:
    """Collective: t2l, on the encoder's own scale."""
    progress("latents from texts")
    store, count = evaluation.run.store, len(evaluation.ids)
    made = store.restore(evaluation.write("t2l", "own", count, evaluation.run.config.sampling).latents)
    return closeness(evaluation, made)


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
