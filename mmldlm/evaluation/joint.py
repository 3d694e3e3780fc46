"""joint: texts made from noise together with their latents. There is no reference, so texts and latents are measured as
a whole: how predictable and how varied they are, how they are distributed, and whether the two belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmldlm.diffusion.noise import MODES, SampleStreams
from mmldlm.evaluation.evaluator import Evaluation
from mmldlm.evaluation.l2t import SHOWN, reencoded
from mmldlm.evaluation.perplexity import CausalModel, nats_of, perplexity
from mmldlm.evaluation.statistics import distinct, frechet_distance, repetition, token_entropy

REPEATED = 4  # tokens of the n-grams that repetition is counted in
_NOISE = len(MODES) + 1  # kind of a generation beside the modes and the unigram texts


def variety(tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What a low perplexity must not be bought with. Of texts of other lengths or in other number, all are others."""
    return {
        "token_entropy": token_entropy(tokens),
        **{f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3)},
        f"repetition_{REPEATED}": repetition(tokens, REPEATED),
    }


def frechet_metrics(evaluation: Evaluation, made: np.ndarray) -> dict[str, Any]:
    """The Frechet distance of standardized latents [n, M, C] to the true ones of the same documents' texts.

    Beside it that of as many other documents' latents, and that of white noise. All None where n is too small.
    """
    count, features = len(made), made[0].size
    rows = made.reshape(count, -1)
    truth = evaluation.latents["own"].reshape(len(evaluation.ids), -1)
    others = truth[count : 2 * count]
    needs = features + 1
    found: dict[str, Any] = dict.fromkeys(("frechet_distance", "frechet_distance_true", "frechet_distance_noise"))
    found["frechet_samples_needed"] = needs
    if count < needs or not np.isfinite(rows).all():
        return found
    noise = SampleStreams(evaluation.config.seed, _NOISE, torch.arange(count)).normal(rows.shape).numpy()
    found["frechet_distance"] = frechet_distance(rows, truth[:count])
    found["frechet_distance_noise"] = frechet_distance(noise, truth[:count])
    if len(others) == count:
        found["frechet_distance_true"] = frechet_distance(others, truth[:count])
    return found


def joint_metrics(evaluation: Evaluation, model: CausalModel | None) -> dict[str, Any]:
    """Collective: texts of the lengths of held-out documents. Keys with `_true` are the same of these documents, with
    `_unigram` of tokens drawn by frequency."""
    evaluation.progress.phase("texts and latents from noise")
    run, count = evaluation.run, evaluation.texts
    written = evaluation.write("joint", "none", count, replace(run.config.sampling, guidance=1.0))
    sets = {
        "": written.tokens,
        "_true": evaluation.tokens[:count],
        "_unigram": evaluation.unigram_tokens(count),
    }
    found: dict[str, Any] = {"texts": count}
    texts = {suffix: evaluation.decode(tokens) for suffix, tokens in sets.items()}
    for suffix, tokens in sets.items():
        found |= {key + suffix: value for key, value in variety(tokens).items()}
        if model is not None:
            evaluation.progress.phase(f"perplexity{suffix.replace('_', ', ')}")
            ours = evaluation.processes
            places = range(ours.rank, count, ours.world_size)
            counted = evaluation.progress.over(places, "texts", len(places))
            nats = evaluation.pooled(nats_of(model, texts[suffix], counted))
            found[f"generative_perplexity{suffix}"] = perplexity(nats)
    found |= frechet_metrics(evaluation, written.latents)
    evaluation.progress.phase("whether texts and latents belong together")
    encoded, raw = evaluation.encode(texts[""]), run.store.restore(written.latents)
    found |= reencoded(encoded, raw)
    found["reencoded_cosine_shuffled"] = reencoded(encoded, np.roll(raw, 1, axis=0))["reencoded_cosine"]
    found["samples"] = texts[""][:SHOWN]
    return found
