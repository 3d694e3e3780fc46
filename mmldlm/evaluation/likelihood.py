"""The likelihood bound of held-out texts, with and without their latents: overall, by length and by noise bin.

Shape letters: n documents, T noise times per document, S noise times of the latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmldlm.diffusion.likelihood import bound_terms
from mmldlm.diffusion.noise import MODES, SampleStreams, draw_noise, mode_weights
from mmldlm.evaluation.controls import bag_of_words_nats
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import BITS, length_buckets, noise_bins, with_interval
from mmldlm.utils.intervals import Ratio, ratio_of_sums

MAX_ORDERED_TOKENS = 64  # longest document whose likelihood by confidence is computed: it takes a pass per token
SHORT = f"_up_to_{MAX_ORDERED_TOKENS}"  # suffix of metrics that only cover documents up to this length
_ORDERED = len(MODES) + 2  # key of the random stream for its noise latents (see `Evaluation`)
# Noise times of the latent at which the bound by way of the latent switches to the text.
LATENT_TIMES = (0.3, 0.5, 0.7, 0.9)
NOVEL_FRACTION = 0.9  # this share of the documents, the least similar to a training text, counts as novel
_ERRORS = ("_standard_error", "_ci95")  # suffixes of keys


@dataclass(frozen=True)
class TextBound:
    """Terms of the likelihood bound of n documents at T noise times each. All are float64 [T, n]."""

    t: np.ndarray  # noise time of the text
    masked: np.ndarray  # number of masked tokens
    nll: np.ndarray  # sum of the masked tokens' nats
    weighted: np.ndarray  # `nll` weighted as in the bound: each entry is an unbiased estimate of the negative ELBO
    length: np.ndarray  # nats of the number of tokens under the length head

    @property
    def nats(self) -> np.ndarray:
        """Estimate of each document's negative ELBO in nats, given its length, float64 [n]."""
        return self.weighted.mean(0)


def text_bound(evaluation: Evaluation, condition: Condition, t_latent: float = 0.0) -> TextBound:
    """Estimate the likelihood bound of all documents, whatever loss the run was trained with (collective).

    Each of the T = `times` draws takes its t from a low-discrepancy grid over all documents (see `bound_terms`). The
    estimate is unbiased, and every condition gets the same draws. The latent of `condition` has noise time `t_latent`.
    For "none", the latent is pure noise.
    """
    run, config, count = evaluation.run, evaluation.config, len(evaluation.ids)
    t_latent = 1.0 if condition == "none" else t_latent
    # The arrays of `TextBound`. Other ranks fill in the remaining documents.
    terms = np.zeros((5, config.times, count))
    for draw, counted, batch in evaluation.draws(condition):
        drawn = bound_terms(run.model, run.objective, batch, t_latent, config.seed, draw, count, run.device)
        if counted:
            terms[:, draw, batch.slots.numpy()] = drawn
    return TextBound(*evaluation.sum_over_ranks(terms))


@torch.no_grad()
def latent_nats(evaluation: Evaluation) -> np.ndarray:
    """Estimate the nats of each document's latent at each time s of `LATENT_TIMES`, float64 [S, n] (collective).

    The latent is generated from noise down to time s, before any token. That costs KL(q(z_s | x0) || p(z_s)), which is
    at most 1/2 of the integral of -SNR'(t) |x0 - estimate(z_t)|^2 over t in [s, 1] (VDM, arXiv 2107.00630, section 5).
    Each of the T draws takes its t from a low-discrepancy grid over all documents. The estimate is unbiased.
    """
    run, config = evaluation.run, evaluation.config
    latent, count, first = run.objective.latent, len(evaluation.ids), min(LATENT_TIMES)
    nats = np.zeros((len(LATENT_TIMES), count))
    for draw, counted, batch in evaluation.draws("own"):
        noise = draw_noise(batch, config.seed, draw, count, mode_weights("joint"))
        t = first + (1 - first) * noise.t_latent
        noised = run.objective.corrupt(batch, replace(noise, t_text=torch.ones_like(t), t_latent=t)).to(run.device)
        _, predicted, *_ = run.model(*noised.inputs)
        if not counted:
            continue
        estimate, _ = latent.estimates(predicted.float(), noised.noised_latents, noised.t_latent)
        error = (batch.latents - estimate.cpu()).double().square().flatten(1).sum(1)
        terms = (1 - first) * latent.noise_schedule.snr_slope(t.double()) / 2 * error
        for row, start in enumerate(LATENT_TIMES):
            nats[row, batch.slots.numpy()] += torch.where(t >= start, terms, 0).numpy() / config.times
    return evaluation.sum_over_ranks(nats)


def _by_way_of_the_latent(evaluation: Evaluation, alone: TextBound) -> list[dict[str, Any]]:
    """Return a row for each noise time of the latent: the bits of the latent, of the text given it, and their sum.

    The sum bounds the text's bits from above at every time. At time 1, the latent is noise and costs nothing
    (collective).
    """
    evaluation.progress.phase("bound, by way of the latent")
    bounds = [
        (nats, text_bound(evaluation, "own", t)) for t, nats in zip(LATENT_TIMES, latent_nats(evaluation), strict=True)
    ]
    rows, nothing = [], np.zeros(len(evaluation.ids))
    for t, (nats, bound) in zip((*LATENT_TIMES, 1.0), [*bounds, (nothing, alone)], strict=True):
        bits = {
            "latent_bits_per_token": _bits(nats, evaluation.lengths).value,
            "text_bits_per_token": _bits(bound.nats, evaluation.lengths).value,
        }
        total = with_interval("bits_per_token", _bits(nats + bound.nats, evaluation.lengths))
        rows.append({"t_latent": t, **bits, **total})
    return rows


def _bits(nats: np.ndarray, units: np.ndarray) -> Ratio:
    """Return bits per unit of n documents. `units` has their numbers of tokens or characters."""
    return ratio_of_sums(nats, units.astype(np.float64)) * BITS


@torch.no_grad()
def confidence_nats(evaluation: Evaluation, condition: Condition, longest: int = MAX_ORDERED_TOKENS) -> np.ndarray:
    """Return the exact nats of the first documents, generated one token at a time in the order of confidence.

    Each step unmasks the position whose most likely token has the largest probability. Its token is drawn from the
    network's distribution. The order follows from the tokens unmasked before, so the product of the probabilities is a
    normalized likelihood of the text given its length (DUEL, arXiv 2603.01367). Returns float64 [n] for `num_texts`
    documents, with NaN for a document of more than `longest` tokens, since each token takes a pass (collective).
    """
    run, text = evaluation.run, evaluation.run.objective.text
    nats = np.zeros(evaluation.num_texts)
    for counted, batch in evaluation.batches(condition, evaluation.num_texts):
        if not counted:
            continue
        layout, truth = batch.layout.to(run.device), batch.tokens.to(run.device)
        is_text, lengths = (each.to(run.device) for each in text.find_texts(batch.tokens, batch.layout))
        ordered = lengths <= longest
        latents, t_latent = batch.latents, torch.zeros(len(lengths), device=run.device)
        if condition == "none":
            latents = SampleStreams(evaluation.config.seed, _ORDERED, batch.slots).normal(latents.shape)
            t_latent = t_latent + 1
        latents, total = latents.to(run.device), torch.zeros(len(lengths), dtype=torch.float64, device=run.device)
        generated = ordered[layout.sample_of_token] & is_text
        tokens = torch.where(generated, text.mask_id, truth)
        while len(positions := (tokens == text.mask_id).nonzero().squeeze(1)):
            sample = layout.sample_of_token[positions]
            masked = torch.bincount(sample, minlength=len(lengths))
            logits, *_ = run.model(tokens, latents, masked / lengths, t_latent, layout, positions, None)
            log_p = logits.double().log_softmax(-1)
            # Sort by confidence, then by sample: the first row of each sample is its most confident position.
            order = log_p.max(-1).values.argsort(descending=True, stable=True)
            order = order[sample[order].argsort(stable=True)]
            chosen = order[(masked.cumsum(0) - masked)[masked > 0]]
            true = truth[positions[chosen]]
            total[sample[chosen]] -= log_p[chosen, true]
            tokens = tokens.index_copy(0, positions[chosen], true)
        nats[batch.slots.numpy()] = total.masked_fill(~ordered, math.nan).cpu()
    return evaluation.sum_over_ranks(nats)


def _by_confidence(evaluation: Evaluation, condition: Condition, bound: TextBound) -> dict[str, Any]:
    """Return bits per token by `confidence_nats`, and the bits of the bound and the lengths for the same documents."""
    evaluation.progress.phase(f"likelihood by confidence, latent {condition}")
    nats = confidence_nats(evaluation, condition)
    ordered = np.flatnonzero(evaluation.lengths[: len(nats)] <= MAX_ORDERED_TOKENS)
    if len(ordered) < 2:
        return {"confidence_documents": len(ordered)}
    tokens, name = evaluation.lengths[ordered], f"bits_per_token_by_confidence{SHORT}"
    return {
        **with_interval(name, _bits(nats[ordered], tokens)),
        f"{name}_bound": _bits(bound.nats[ordered], tokens).value,
        f"length_bits_per_token{SHORT}": _bits(bound.length.mean(0)[ordered], tokens).value,
        "confidence_documents": len(ordered),
    }


def likelihood_of_text(evaluation: Evaluation) -> dict[str, Any]:
    """Return the bound of texts without latents, with the baselines unigram and trigram (collective)."""
    evaluation.progress.phase("bound, no latent")
    bound, unigram = text_bound(evaluation, "none"), evaluation.unigram_nats()
    controls = _bits_by_unit(evaluation, unigram)
    controls |= _bits_with_length(evaluation, unigram, evaluation.marginal_length_nats())
    kept = {f"unigram_{key}": value for key, value in controls.items() if not key.endswith(_ERRORS)}
    # The trigram model ends a text by a token, so the bits of the length are among the others.
    kept["trigram_bits_per_token_with_length"] = evaluation.trigram_bits_per_token(evaluation.tokens)
    return {
        **_text_metrics(evaluation, bound, "none"),
        "controls": kept,
        "by_length": _by_length(evaluation, bound, {"unigram_bits_per_token": unigram}),
        "by_t_text": _by_noise_bin(evaluation, bound, {}),
        "by_way_of_the_latent": _by_way_of_the_latent(evaluation, bound),
    }


def likelihood_given_latents(evaluation: Evaluation) -> dict[str, Any]:
    """Return the bound of texts given their own latents, another document's, and the mean latent (collective)."""
    bounds: dict[Condition, TextBound] = {}
    conditions: tuple[Condition, ...] = ("own", "shuffled", "mean")
    for condition in conditions:
        evaluation.progress.phase(f"bound, latent {condition}")
        bounds[condition] = text_bound(evaluation, condition)
    own, shuffled, unigram = bounds["own"], bounds["shuffled"], evaluation.unigram_nats()
    evaluation.progress.phase("bag of words given the latent")
    baselines = {
        "shuffled": shuffled.nats,
        "mean_latent": bounds["mean"].nats,
        "unigram": unigram,
        "bag_of_words": bag_of_words_nats(evaluation),
    }
    by_length = {f"bits_per_token_{name}": baselines[name] for name in ("shuffled", "unigram")}
    return {
        **_text_metrics(evaluation, own, "own"),
        **{f"bits_per_token_{name}": _bits(nats, evaluation.lengths).value for name, nats in baselines.items()},
        "by_length": _by_length(evaluation, own, by_length),
        "by_t_text": _by_noise_bin(evaluation, own, {"bits_per_masked_token_shuffled": shuffled}),
    }


def _text_metrics(evaluation: Evaluation, bound: TextBound, condition: Condition) -> dict[str, Any]:
    """Return the bits of the bound without and with lengths, for novel documents only, and by confidence."""
    # Leave out the tenth of the documents that is most similar to training texts.
    novel = np.argsort(evaluation.document_similarity, kind="stable")[: max(1, int(NOVEL_FRACTION * len(bound.nats)))]
    return {
        **_bits_by_unit(evaluation, bound.nats),
        **_bits_with_length(evaluation, bound.nats, bound.length.mean(0)),
        "bits_per_token_novel": _bits(bound.nats[novel], evaluation.lengths[novel]).value,
        **_by_confidence(evaluation, condition, bound),
    }


def _bits_with_length(evaluation: Evaluation, nats: np.ndarray, length_nats: np.ndarray) -> dict[str, Any]:
    """Return bits per token of the lengths, and of the texts with their lengths."""
    total = _bits_by_unit(evaluation, nats + length_nats)
    return {
        "length_bits_per_token": _bits(length_nats, evaluation.lengths).value,
        **{key.replace("_token", "_token_with_length"): value for key, value in total.items() if "_token" in key},
    }


def _bits_by_unit(evaluation: Evaluation, nats: np.ndarray) -> dict[str, Any]:
    """Return bits per token and per character, with standard errors and intervals."""
    metrics: dict[str, Any] = {}
    characters = evaluation.split.characters[evaluation.ids]
    for unit, sizes in (("token", evaluation.lengths), ("character", characters)):
        bits = _bits(nats, sizes)
        metrics[f"bits_per_{unit}"] = bits.value
        metrics[f"bits_per_{unit}_standard_error"] = bits.standard_error
        metrics[f"bits_per_{unit}_ci95"] = list(bits.interval)
    return metrics


def _by_length(evaluation: Evaluation, bound: TextBound, baselines: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a row for each length bucket, `tokens_from` to `tokens_to` tokens. `baselines` has nats per document."""
    lengths = evaluation.lengths
    return [
        {
            **row,
            "documents": int(inside.sum()),
            **with_interval("bits_per_token", _bits(bound.nats[inside], lengths[inside])),
            **{name: _bits(nats[inside], lengths[inside]).value for name, nats in baselines.items()},
        }
        for row, inside in length_buckets(lengths)
    ]


def _by_noise_bin(evaluation: Evaluation, bound: TextBound, baselines: dict[str, TextBound]) -> list[dict[str, Any]]:
    """Return a row for the draws with t_text in each [`t_from`, `t_to`). `bits_of_bound` add up to bits per token."""
    rows = []
    # Each of the T draws estimates the whole bound, so every token counts T times.
    all_tokens = bound.weighted.shape[0] * float(evaluation.lengths.sum())
    for row, inside in noise_bins(bound.t):
        # Baselines have the same times and masks, so they also have the same bins and denominators.
        masked = float(bound.masked[inside].sum())
        for name, measured in {"bits_per_masked_token": bound, **baselines}.items():
            row[name] = float(measured.nll[inside].sum()) / masked * BITS if masked else None
        rows.append({**row, "bits_of_bound": float(bound.weighted[inside].sum()) / all_tokens * BITS})
    return rows
