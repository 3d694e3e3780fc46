"""Masked (absorbing-state) diffusion of text: corruption, loss weights, reverse steps (MDLM, arXiv 2406.07524).

Shape letters: B samples, N tokens of the whole unpadded micro-batch, L tokens of a sample. Noise times t are [B].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.noise_schedule import MAX_MODE_SCALE, MIN_TEXT_TIME, TimeSampler
from mmldlm.settings.declaration import require_effect, setting

TextLoss = Literal["elbo", "masked_mean"]
Masks = Literal["independent", "exact"]
MIN_EXACT_TIME = 1e-7  # the lowest time under exact masks: it masks one token in texts of up to 10 million tokens


@dataclass(frozen=True)
class TextConfig:
    """Diffusion process of the text."""

    time_sampling: Literal["uniform", "mode"] = setting(
        "uniform",
        "distribution of t_text in training. mode favors the middle, and `loss.text: elbo` is then weighted by "
        "1 / density, so that it remains a bound",
    )
    mode_scale: float = setting(
        1.29, "mode: 0 is uniform, larger values favor the middle over the ends", above=-1, below=MAX_MODE_SCALE
    )
    stratified: bool = setting(
        True, "true: t_text from a low-discrepancy grid over the global batch. false: independent draws"
    )
    masks: Masks = setting(
        "exact",
        "exact: mask the fraction t_text of a text's tokens, rounded up. independent: mask each token with "
        "probability t_text, which gives the same bound with far more variance",
    )

    def __post_init__(self) -> None:
        require_effect(self, "mode_scale", "time_sampling", "mode")

    @property
    def sampler(self) -> TimeSampler:
        """Distribution of t_text."""
        # Exact masks need no bound of 1 / t: a time above 0 masks at least one token.
        lowest = MIN_TEXT_TIME if self.masks == "independent" else MIN_EXACT_TIME
        return TimeSampler(self.time_sampling, mode_scale=self.mode_scale, stratified=self.stratified, lowest=lowest)


class MaskedDiffusion:
    """Masked diffusion: a token stays unmasked with probability alpha(t) = 1 - t (MDLM, section 3.5).

    A sample may begin with a prefix, a condition that ends with the token `prefix_end`. The prefix is never masked, and
    no loss counts it. By default no sample has a prefix.
    """

    def __init__(self, mask_id: int, loss: TextLoss, masks: Masks = "exact", prefix_end: int = -1):
        self.mask_id, self.loss_kind, self.masks, self.prefix_end = mask_id, loss, masks, prefix_end

    def find_texts(self, tokens: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Return on the host a mask of the tokens outside prefixes, bool [N], and their number by sample, int64 [B]."""
        ends = (tokens == self.prefix_end).nonzero().squeeze(1)
        prefixes = torch.zeros(layout.num_samples, dtype=torch.int64)
        prefixes[layout.sample_of_token[ends]] = layout.position[ends] + 1
        return layout.position >= prefixes[layout.sample_of_token], torch.tensor(layout.lengths) - prefixes

    def token_mask(self, uniforms: Tensor, t: Tensor, sample_of_token: Tensor) -> Tensor:
        """Return which tokens are masked at times t [B], bool [N], given one random number per token, float32 [N].

        Exact masks take the tokens with the smallest numbers. A token with the number 1 is never masked, and does not
        count as part of the text. `sample_of_token` is int64 [N], sorted.
        """
        if self.masks == "exact":
            lengths = torch.bincount(sample_of_token, minlength=len(t))
            maskable = torch.bincount(sample_of_token[uniforms < 1], minlength=len(t))
            # After sorting by (sample, number), a token's rank in its sample is its index minus the sample's start.
            by_number = uniforms.argsort()
            order = by_number[sample_of_token[by_number].argsort(stable=True)]
            rank = torch.empty_like(order)
            rank[order] = torch.arange(len(order)) - (lengths.cumsum(0) - lengths)[sample_of_token[order]]
            return rank < _exact_counts(t, maskable)[sample_of_token]
        return uniforms < (1 - (1 - t))[sample_of_token].to(uniforms.dtype)  # 1 - alpha

    def weights(self, t: Tensor, lengths: Tensor, importance: Tensor, limit: float = math.inf) -> Tensor:
        """Return the weight [B] of a masked token's negative log likelihood in each sample.

        `elbo`: -alpha' / (1 - alpha). The weighted sum over masked tokens is an unbiased estimate of the negative ELBO
        of the text in nats (MDLM, eq. 10, and MD4, arXiv 2406.04329, eq. 5). With exact masks the weight is L / n for n
        masked tokens of L. Uniform times make n uniform in 1..L, and the sum estimates the same bound, like the sum
        over a random order of the tokens (arXiv 2110.02037, eq. 6).

        `masked_mean`: 1.

        Args:
            importance: 1 / density of the times, [B].
            limit: Upper bound of the weight before `importance`. A finite bound makes the estimate biased.
        """
        if self.loss_kind != "elbo":
            return torch.ones_like(t)
        if self.masks == "exact":
            # In t2l no token is masked, and `Objective.corrupt` would turn an infinite weight times 0 into NaN.
            per_token = lengths / _exact_counts(t, lengths).clamp_min(1)
        else:
            per_token = 1 / t.clamp_min(MIN_TEXT_TIME)
        return per_token.clamp_max(limit) * importance

    # --- reverse ----------------------------------------------------------------------------------------

    def unmask_probability(self, t: float, s: float, remask: float) -> tuple[float, float]:
        """Return the probabilities, in a step from t to s < t, of unmasking a masked token and of masking another.

        `remask` is eta in [0, 1] of ReMDM (arXiv 2503.00307, eq. 8 with sigma = eta x its largest value). With 0 this
        is the plain reverse process (MDLM, eq. 7).
        """
        alpha_t, alpha_s = 1 - t, 1 - s
        # At t = 1 nothing is unmasked yet, so there is nothing to remask.
        sigma = 0.0 if alpha_t <= 0 else remask * min(1.0, (1 - alpha_s) / alpha_t)
        return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), sigma


def _exact_counts(t: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of masked tokens of each sample, int64 [B]: t x length, rounded up."""
    return (t.double() * lengths).ceil().long()
