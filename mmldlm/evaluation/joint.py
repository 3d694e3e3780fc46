"""Metrics of joint generation: texts and their latents from noise.

There is no reference, so we measure the generations as a set: how much the texts are like the language of the training
split, how diverse they are, how the latents are distributed, and whether each text fits its latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmldlm.diffusion.noise import MODES, SampleStreams
from mmldlm.evaluation.evaluator import Evaluation
from mmldlm.evaluation.l2t import NUM_SHOWN_SAMPLES, add_suffix, memorization_metrics, reencoding_metrics
from mmldlm.evaluation.statistics import distinct, frechet_distance, repetition, token_entropy

REPETITION_NGRAM = 4  # tokens
_NOISE = len(MODES) + 1  # key of the random stream for noise latents, after the keys of the modes and of unigram texts


def diversity_metrics(tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return entropy, distinct-n and repetition of texts.

    All of them depend on the number and the lengths of the texts, so compare only sets with equal numbers and lengths.
    """
    return {
        "token_entropy": token_entropy(tokens),
        **{f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3)},
        f"repetition_{REPETITION_NGRAM}": repetition(tokens, REPETITION_NGRAM),
    }


def frechet_metrics(evaluation: Evaluation, latents: np.ndarray) -> dict[str, Any]:
    """Return the Frechet distance between standardized latents [n, M, C] and the first n documents' true latents.

    The baselines are the distances of n other documents' latents (`_true`) and of white noise (`_noise`). If n is too
    small, all distances are None.
    """
    count, features = len(latents), latents[0].size
    rows = latents.reshape(count, -1)
    truth = evaluation.latents["own"].reshape(len(evaluation.ids), -1)
    # Take other documents than the reference: the distance between two true sets shows the bias of few samples.
    others = truth[count : 2 * count]
    min_samples = features + 1
    metrics: dict[str, Any] = dict.fromkeys(("frechet_distance", "frechet_distance_true", "frechet_distance_noise"))
    metrics["frechet_samples_needed"] = min_samples
    if count < min_samples or not np.isfinite(rows).all():
        return metrics
    noise = SampleStreams(evaluation.config.seed, _NOISE, torch.arange(count)).normal(rows.shape).numpy()
    metrics["frechet_distance"] = frechet_distance(rows, truth[:count])
    metrics["frechet_distance_noise"] = frechet_distance(noise, truth[:count])
    if len(others) == count:
        metrics["frechet_distance_true"] = frechet_distance(others, truth[:count])
    return metrics


def joint_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Return the joint metrics, for texts generated with the lengths of held-out documents (collective).

    Keys with `_true` are measured on the held-out documents, keys with `_shuffled_words` on their tokens in random
    order, and keys with `_unigram` on tokens drawn by frequency.
    """
    evaluation.progress.phase("texts and latents from noise")
    run, count = evaluation.run, evaluation.num_texts
    sampling = run.config.sampling
    generated = evaluation.generate("joint", "none", count, replace(sampling, joint_latents="drawn"))
    latents = generated.latents
    if sampling.joint_order == "latents_first" and sampling.joint_latents == "of_text":
        latents = evaluation.generate_latents(generated.tokens, sampling, evaluation.prefixes)
    token_sets = {
        "": generated.tokens,
        "_true": evaluation.tokens[:count],
        "_unigram": evaluation.unigram_tokens(count),
    }
    metrics: dict[str, Any] = {"texts": count}
    texts = {suffix: evaluation.decode(tokens) for suffix, tokens in token_sets.items()}
    for suffix, tokens in token_sets.items():
        metrics |= {key + suffix: value for key, value in diversity_metrics(tokens).items()}
    rng = np.random.default_rng(evaluation.config.seed)
    token_sets["_shuffled_words"] = [rng.permutation(tokens).tolist() for tokens in token_sets["_true"]]
    for suffix, tokens in token_sets.items():
        metrics[f"trigram_bits_per_token{suffix}"] = evaluation.trigram_bits_per_token(tokens)
    metrics |= frechet_metrics(evaluation, latents)
    evaluation.progress.phase("re-encoding of the generated texts")
    encoded = evaluation.encode(texts[""])
    # If the text comes first, no latent is drawn before it.
    drawn = [("_drawn", generated.latents)] * (sampling.joint_order != "text_first")
    for suffix, standardized in (*drawn, ("", latents)):
        raw = run.store.restore(standardized)
        measured = reencoding_metrics(encoded, raw)
        other = reencoding_metrics(encoded, np.roll(raw, 1, axis=0))["reencoded_cosine"]
        metrics |= {add_suffix(key, suffix): value for key, value in measured.items() if key != "unencodable"}
        metrics |= {f"reencoded_cosine{suffix}_shuffled": other, "unencodable": measured["unencodable"]}
    metrics |= memorization_metrics(evaluation, generated.tokens)
    metrics["samples"] = texts[""][:NUM_SHOWN_SAMPLES]
    return metrics
