"""The likelihood bound of held-out texts, alone and given their latents: as a whole, by length and by noise level."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, Objective
from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import BITS, length_buckets, noise_levels, ratio


@dataclass(frozen=True)
class TextBound:
    """Of n documents at T noise times each; all float64 [T, n]."""

    t: np.ndarray  # noise time of the text
    masked: np.ndarray  # tokens that were masked
    nll: np.ndarray  # nats of those, summed
    weighted: np.ndarray  # the same with the weights of the bound: each an unbiased estimate of the negative ELBO

    @property
    def nats(self) -> np.ndarray:
        """float64 [n]: estimate of each document's negative ELBO."""
        return self.weighted.mean(0)


@torch.no_grad()
def text_bound(evaluation: Evaluation, condition: Condition) -> TextBound:
    """Collective: the bound, whatever loss the run was trained by.

    Each of `times` draws takes its t from a low-discrepancy grid over all documents; unbiased, and the same draws for
    every condition.
    """
    run, config = evaluation.run, evaluation.config
    text = MaskedDiffusion(run.store.manifest.mask_id, "elbo")
    objective = Objective(LossConfig(), text, run.objective.latent)
    count = len(evaluation.ids)
    found = np.zeros((4, config.times, count))
    for draw, counts, batch in evaluation.draws(condition):
        noise = draw_noise(batch, config.seed, draw, count, mode_weights("l2t"))
        if condition == "none":
            noise = replace(noise, t_latent=torch.ones_like(noise.t_latent))
        noised = objective.corrupt(batch, noise)
        prediction, *_ = run.model(*noised.to(run.device).inputs)
        if not counts:
            continue
        # On the host, where sums have one order.
        nll, of = prediction.double().cpu(), noised.layout.sample_of_token[noised.positions]
        empty = torch.zeros(len(batch.lengths), dtype=torch.float64)
        of_tokens = torch.ones_like(nll), nll, noised.token_weight.double() * nll
        summed = [empty.index_add(0, of, values) for values in of_tokens]
        found[:, draw, batch.slots.numpy()] = torch.stack([noise.t_text.double(), *summed])
    return TextBound(*evaluation.pooled(found))


def likelihood_of_text(evaluation: Evaluation) -> dict[str, Any]:
    """Collective: the text alone, beside its unigram."""
    evaluation.progress.phase("bound, no latent")
    bound, unigram = text_bound(evaluation, "none"), evaluation.unigram_nats()
    return {
        **_bits(evaluation, bound.nats),
        "controls": {f"unigram_{key}": value for key, value in _bits(evaluation, unigram, only_values=True).items()},
        "by_length": _by_length(evaluation, bound, {"unigram_bits_per_token": unigram}),
        "by_t_text": _by_level(evaluation, bound, {}),
    }


def likelihood_given_latents(evaluation: Evaluation) -> dict[str, Any]:
    """Collective: the text given its latent, another document's and the mean latent."""
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
        "bits_per_token_shuffled": ratio(shuffled.nats, tokens).value * BITS,
        "bits_per_token_mean_latent": ratio(bounds["mean"].nats, tokens).value * BITS,
        "bits_per_token_unigram": ratio(unigram, tokens).value * BITS,
        "by_length": _by_length(
            evaluation, own, {"bits_per_token_shuffled": shuffled.nats, "bits_per_token_unigram": unigram}
        ),
        "by_t_text": _by_level(evaluation, own, {"bits_per_masked_token_shuffled": shuffled}),
    }


def _bits(evaluation: Evaluation, nats: np.ndarray, only_values: bool = False) -> dict[str, Any]:
    """Per token and per character, with standard error and interval."""
    found: dict[str, Any] = {}
    for unit, sizes in (("token", evaluation.lengths), ("character", evaluation.characters)):
        bits = ratio(nats, sizes.astype(np.float64)) * BITS
        found[f"bits_per_{unit}"] = bits.value
        if not only_values:
            found[f"bits_per_{unit}_standard_error"] = bits.standard_error
            found[f"bits_per_{unit}_ci95"] = list(bits.interval)
    return found


def _by_length(evaluation: Evaluation, bound: TextBound, controls: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of documents from `tokens_from` to `tokens_to` tokens; `controls` are nats of each document."""
    rows, lengths = [], evaluation.lengths
    for first, last in length_buckets(lengths):
        inside = (lengths >= first) & (lengths <= last)
        tokens = lengths[inside].astype(np.float64)
        bits = ratio(bound.nats[inside], tokens) * BITS
        rows.append(
            {
                "tokens_from": first,
                "tokens_to": last,
                "documents": int(inside.sum()),
                "bits_per_token": bits.value,
                "bits_per_token_ci95": list(bits.interval),
                **{name: ratio(nats[inside], tokens).value * BITS for name, nats in controls.items()},
            }
        )
    return rows


def _by_level(evaluation: Evaluation, bound: TextBound, controls: dict[str, TextBound]) -> list[dict[str, Any]]:
    """Rows of the draws with t_text in [`t_from`, `t_to`).

    `bits_of_bound` is what a level adds to the bits per token: the column sums to them.
    """
    rows = []
    all_tokens = bound.weighted.shape[0] * float(evaluation.lengths.sum())
    for row, inside in noise_levels(bound.t):
        masked = float(bound.masked[inside].sum())
        rows.append(
            {
                **row,
                "bits_per_masked_token": float(bound.nll[inside].sum()) / masked * BITS if masked else None,
                **{
                    name: float(other.nll[inside].sum()) / masked * BITS if masked else None
                    for name, other in controls.items()
                },
                "bits_of_bound": float(bound.weighted[inside].sum()) / all_tokens * BITS,
            }
        )
    return rows
