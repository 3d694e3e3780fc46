"""The likelihood bound of held-out texts, with and without their latents: as a whole, by length and by noise bin.

Shape letters: n documents, T noise times per document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, Objective
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import BITS, length_buckets, noise_bins
from mmldlm.utils.ratio import ratio_of_sums


@dataclass(frozen=True)
class TextBound:
    """Terms of the likelihood bound of n documents at T noise times each; all float64 [T, n]."""

    t: np.ndarray  # noise time of the text
    masked: np.ndarray  # number of masked tokens
    nll: np.ndarray  # nats of the masked tokens, summed
    weighted: np.ndarray  # `nll` with the weights of the bound: each an unbiased estimate of the negative ELBO

    @property
    def nats(self) -> np.ndarray:
        """Estimate of each document's negative ELBO in nats, float64 [n]."""
        return self.weighted.mean(0)


@torch.no_grad()
def text_bound(evaluation: Evaluation, condition: Condition) -> TextBound:
    """Estimate the likelihood bound of all documents, whatever loss the run was trained with (collective).

    Each of the T = `times` draws takes its t from a low-discrepancy grid over all documents. The estimate is unbiased,
    and every condition gets the same draws.
    """
    run, config = evaluation.run, evaluation.config
    text = MaskedDiffusion(run.store.manifest.mask_id, "elbo")
    objective = Objective(LossConfig(), text, run.objective.latent)
    count = len(evaluation.ids)
    # The four arrays of `TextBound`; other ranks fill in the remaining documents.
    terms = np.zeros((4, config.times, count))
    for draw, counted, batch in evaluation.draws(condition):
        noise = draw_noise(batch, config.seed, draw, count, mode_weights("l2t"))
        # l2t pins t_latent to 0. At 1 the network gets noise, whatever the latents of the batch are.
        if condition == "none":
            noise = replace(noise, t_latent=torch.ones_like(noise.t_latent))
        noised = objective.corrupt(batch, noise)
        prediction, *_ = run.model(*noised.to(run.device).inputs)
        if not counted:
            continue
        # On the host, where the order of summation is fixed.
        nll, sample = prediction.double().cpu(), noised.layout.sample_of_token[noised.positions]
        empty = torch.zeros(len(batch.lengths), dtype=torch.float64)
        token_terms = torch.ones_like(nll), nll, noised.token_weight.double() * nll
        sample_terms = [empty.index_add(0, sample, values) for values in token_terms]
        terms[:, draw, batch.slots.numpy()] = torch.stack([noise.t_text.double(), *sample_terms])
    return TextBound(*evaluation.sum_over_ranks(terms))


def likelihood_of_text(evaluation: Evaluation) -> dict[str, Any]:
    """Return the bound of the texts alone, with the unigram baseline (collective)."""
    evaluation.progress.phase("bound, no latent")
    bound, unigram = text_bound(evaluation, "none"), evaluation.unigram_nats()
    return {
        **_bits(evaluation, bound.nats),
        "controls": {f"unigram_{key}": value for key, value in _bits(evaluation, unigram, only_values=True).items()},
        "by_length": _by_length(evaluation, bound, {"unigram_bits_per_token": unigram}),
        "by_t_text": _by_noise_bin(evaluation, bound, {}),
    }


def likelihood_given_latents(evaluation: Evaluation) -> dict[str, Any]:
    """Return the bound of the texts given their own latents, another document's and the mean latent (collective)."""
    bounds: dict[Condition, TextBound] = {}
    conditions: tuple[Condition, ...] = ("own", "shuffled", "mean")
    for condition in conditions:
        evaluation.progress.phase(f"bound, latent {condition}")
        bounds[condition] = text_bound(evaluation, condition)
    own, shuffled = bounds["own"], bounds["shuffled"]
    tokens = evaluation.lengths.astype(np.float64)
    unigram = evaluation.unigram_nats()
    return {
        **_bits(evaluation, own.nats),
        "bits_per_token_shuffled": ratio_of_sums(shuffled.nats, tokens).value * BITS,
        "bits_per_token_mean_latent": ratio_of_sums(bounds["mean"].nats, tokens).value * BITS,
        "bits_per_token_unigram": ratio_of_sums(unigram, tokens).value * BITS,
        "by_length": _by_length(
            evaluation, own, {"bits_per_token_shuffled": shuffled.nats, "bits_per_token_unigram": unigram}
        ),
        "by_t_text": _by_noise_bin(evaluation, own, {"bits_per_masked_token_shuffled": shuffled}),
    }


def _bits(evaluation: Evaluation, nats: np.ndarray, only_values: bool = False) -> dict[str, Any]:
    """Return bits per token and per character, unless `only_values` with standard error and interval."""
    metrics: dict[str, Any] = {}
    for unit, sizes in (("token", evaluation.lengths), ("character", evaluation.characters)):
        bits = ratio_of_sums(nats, sizes.astype(np.float64)) * BITS
        metrics[f"bits_per_{unit}"] = bits.value
        if not only_values:
            metrics[f"bits_per_{unit}_standard_error"] = bits.standard_error
            metrics[f"bits_per_{unit}_ci95"] = list(bits.interval)
    return metrics


def _by_length(evaluation: Evaluation, bound: TextBound, baselines: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return one row per length bucket, `tokens_from` to `tokens_to` tokens; `baselines` are nats per document."""
    rows, lengths = [], evaluation.lengths
    for first, last in length_buckets(lengths):
        inside = (lengths >= first) & (lengths <= last)
        tokens = lengths[inside].astype(np.float64)
        bits = ratio_of_sums(bound.nats[inside], tokens) * BITS
        rows.append(
            {
                "tokens_from": first,
                "tokens_to": last,
                "documents": int(inside.sum()),
                "bits_per_token": bits.value,
                "bits_per_token_ci95": list(bits.interval),
                **{name: ratio_of_sums(nats[inside], tokens).value * BITS for name, nats in baselines.items()},
            }
        )
    return rows


def _by_noise_bin(evaluation: Evaluation, bound: TextBound, baselines: dict[str, TextBound]) -> list[dict[str, Any]]:
    """Return one row per noise bin, the draws with t_text in [`t_from`, `t_to`).

    `bits_of_bound` is what the bin contributes to the bits per token: the column sums to them.
    """
    rows = []
    # Each of the T draws estimates the whole bound, so the tokens count T times.
    all_tokens = bound.weighted.shape[0] * float(evaluation.lengths.sum())
    for row, inside in noise_bins(bound.t):
        # Baselines have the same times and masks, hence the same bins and denominators.
        masked = float(bound.masked[inside].sum())
        rows.append(
            {
                **row,
                "bits_per_masked_token": float(bound.nll[inside].sum()) / masked * BITS if masked else None,
                **{
                    name: float(other.nll[inside].sum()) / masked * BITS if masked else None
                    for name, other in baselines.items()
                },
                "bits_of_bound": float(bound.weighted[inside].sum()) / all_tokens * BITS,
            }
        )
    return rows
