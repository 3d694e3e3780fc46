"""Masked (absorbing-state) diffusion of text: corruption, loss weights, reverse steps (MDLM, arXiv 2406.07524).

Shape letters: B samples, N tokens of the whole unpadded micro-batch, L tokens of a sample, P predicted tokens,
V vocabulary. Noise times t are [B].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.noise import RandomSource, draw_uniform
from mmldlm.diffusion.schedule import MAX_MODE_SCALE, LogLinear, TimeSampler
from mmldlm.settings.fields import require_effect, setting

TextLoss = Literal["elbo", "masked_mean"]
TextDecoding = Literal["ancestral", "confidence"]
Masks = Literal["independent", "exact"]


@dataclass(frozen=True)
class TextConfig:
    """Diffusion process of the text."""

    time_sampling: Literal["uniform", "mode"] = setting(
        "uniform",
        "distribution of t_text in training; mode favors the middle, and `loss.text: elbo` is weighted by 1 / density, "
        "so that it remains a bound",
    )
    mode_scale: float = setting(
        1.29, "mode: 0 is uniform; larger values favor the middle over the ends", above=-1, below=MAX_MODE_SCALE
    )
    stratified: bool = setting(
        True, "t_text from a low-discrepancy grid over the global batch; false: independent draws"
    )
    masks: Masks = setting(
        "independent",
        "independent: each token is masked with probability t_text; exact: the fraction t_text of a text's tokens, "
        "rounded up, which gives the same bound with far less variance",
    )

    def __post_init__(self) -> None:
        require_effect(self, "mode_scale", "time_sampling", "mode")

    @property
    def sampler(self) -> TimeSampler:
        """Distribution of t_text."""
        return TimeSampler(self.time_sampling, mode_scale=self.mode_scale, stratified=self.stratified)


class MaskedDiffusion:
    """Masked diffusion with the schedule alpha(t) = 1 - t.

    Args:
        mask_id: Id of [MASK].
        loss: Weight of the masked tokens.
        masks: How the masked tokens are drawn.
    """

    def __init__(self, mask_id: int, loss: TextLoss, masks: Masks = "independent"):
        self.mask_id = mask_id
        self.loss_kind = loss
        self.masks = masks
        self.schedule = LogLinear()

    def token_mask(self, uniforms: Tensor, t: Tensor, sample_of_token: Tensor) -> Tensor:
        """Return which tokens are masked at time t, bool [N].

        Args:
            uniforms: float32 [N], one per token. With exact masks, the tokens with the smallest are masked.
            t: Noise times [B].
            sample_of_token: int64 [N], sorted.
        """
        if self.masks == "exact":
            lengths = torch.bincount(sample_of_token, minlength=len(t))
            # Sorted by (sample, number), a token's rank in its sample is its index less that of the sample's start.
            by_number = uniforms.argsort()
            order = by_number[sample_of_token[by_number].argsort(stable=True)]
            rank = torch.empty_like(order)
            rank[order] = torch.arange(len(order)) - (lengths.cumsum(0) - lengths)[sample_of_token[order]]
            return rank < _exact_counts(t, lengths)[sample_of_token]
        return uniforms < (1 - self.schedule.alpha(t))[sample_of_token].to(uniforms.dtype)

    def corrupt(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Return the tokens with [MASK] where `masked` (bool [N]) is set."""
        return tokens.masked_fill(masked, self.mask_id)

    def weights(self, t: Tensor, lengths: Tensor, importance: Tensor, limit: float = math.inf) -> Tensor:
        """Return the weight [B] of a masked token's negative log likelihood in each sample.

        `elbo`: -alpha' / (1 - alpha). The weighted sum over masked tokens is an unbiased estimate of the negative ELBO
        of the text in nats (MDLM, eq. 10; MD4, arXiv 2406.04329, eq. 5). With exact masks the weight is L / n for n
        masked tokens of L. Uniform times make n uniform in 1..L, and the sum estimates the same bound, as that of a
        random order of the tokens (arXiv 2110.02037, eq. 6).

        `masked_mean`: 1.

        Args:
            t: Noise times [B].
            lengths: Tokens of each sample, int64 [B].
            importance: 1 / density of the times, [B].
            limit: Upper bound of the weight before `importance`; it makes the estimate biased.
        """
        if self.loss_kind != "elbo":
            return torch.ones_like(t)
        if self.masks == "exact":
            # t2l has no masks: an infinite weight would become NaN when `Objective.corrupt` multiplies it by 0.
            per_token = lengths / _exact_counts(t, lengths).clamp_min(1)
        else:
            per_token = self.schedule.elbo_weight(t)
        return per_token.clamp_max(limit) * importance

    # --- reverse ----------------------------------------------------------------------------------------

    def unmask_probability(self, t: float, s: float, remask: float) -> tuple[float, float]:
        """Return the probabilities, in a step from t to s < t, of unmasking a masked token and of masking another.

        `remask` is eta in [0, 1] of ReMDM (arXiv 2503.00307, eq. 8 with sigma = eta x its largest value); 0 is the
        plain reverse process (MDLM, eq. 7).
        """
        alpha_t, alpha_s = 1 - t, 1 - s
        # At t = 1 nothing is unmasked yet, so there is nothing to remask.
        sigma = 0.0 if alpha_t <= 0 else remask * min(1.0, (1 - alpha_s) / alpha_t)
        return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), sigma

    def select_tokens(
        self,
        noised: Tensor,
        t: float,
        s: float,
        layout: PackedLayout,
        decoding: TextDecoding,
        remask: float,
        generator: RandomSource,
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens that a step from t to s may unmask, and those that it remasks; bool [N] each.

        Called before the network, which then predicts the first ones only. `ancestral`: each masked token with the
        probability of the reverse process. `confidence`: all masked tokens. At s = 0 no token stays masked.
        """
        is_masked = noised == self.mask_id
        if s <= 0 or decoding == "confidence":
            assert remask == 0 or decoding == "ancestral", "confidence-based decoding has no remasking"
            return is_masked, torch.zeros_like(is_masked)
        p_unmask, p_remask = self.unmask_probability(t, s, remask)
        # One number serves both rules, since a token is either masked or not.
        uniform = draw_uniform(generator, noised.shape, torch.float32, layout.sample_of_token).to(noised.device)
        return is_masked & (uniform < p_unmask), ~is_masked & (uniform < p_remask)

    def reverse_step(
        self,
        noised: Tensor,
        proposal: Tensor,
        confidence: Tensor,
        selected: tuple[Tensor, Tensor],
        s: float,
        layout: PackedLayout,
        decoding: TextDecoding,
    ) -> Tensor:
        """Return the tokens [N] at time s.

        `confidence` decoding unmasks the most confident proposals, so many that round(s L) tokens stay masked (MaskGIT,
        arXiv 2202.04200, section 3.2).

        Args:
            noised: Tokens [N] before the step.
            proposal: Tokens [N] drawn from the network, used where they may be unmasked.
            confidence: Their log probabilities [N].
            selected: Result of `select_tokens`.
            s: Time after the step.
            layout: Which tokens belong to which sample.
            decoding: Order of unmasking.
        """
        unmask, remask = selected
        if decoding == "confidence" and s > 0:
            unmask = unmask & self._most_confident(unmask, confidence, s, layout)
        return torch.where(unmask, proposal, noised).masked_fill(remask, self.mask_id)

    def _most_confident(self, is_masked: Tensor, confidence: Tensor, s: float, layout: PackedLayout) -> Tensor:
        """Return the masked tokens to unmask, bool [N], so that round(s L) of each sample stay masked."""
        choice = torch.zeros_like(is_masked)
        start = 0
        for length in layout.lengths:
            part = slice(start, start + length)
            masked = is_masked[part]
            count = max(0, int(masked.sum()) - round(s * length))
            indices = confidence[part].masked_fill(~masked, float("-inf")).topk(count).indices
            choice[part][indices] = True
            start += length
        return choice


def _exact_counts(t: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of masked tokens of each sample, t x lengths rounded up; int64 [B]."""
    return (t.double() * lengths).ceil().long()


def sharpen(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return log probabilities [P, V] at a temperature, truncated to the smallest set with mass `top_p`.

    The truncation is nucleus sampling (arXiv 1904.09751). At temperature 0, where `draw_tokens` returns the most likely
    token, the probabilities are those at temperature 1, which confidence-based decoding needs.
    """
    log_p = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if top_p >= 1:
        return log_p
    sorted_log_p, index = log_p.sort(-1, descending=True)
    # Mass before a token, not including it: the first token always stays.
    mass_before = sorted_log_p.exp().cumsum(-1) - sorted_log_p.exp()
    removed = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, index, mass_before >= top_p)
    return log_p.masked_fill(removed, float("-inf")).log_softmax(-1)


def draw_tokens(log_p: Tensor, temperature: float, generator: RandomSource, samples: Tensor | None = None) -> Tensor:
    """Draw one token per row by the Gumbel-max trick, or take the most likely one at temperature 0.

    The noise is float64: in lower precision Gumbel noise truncates the tails, which lowers the effective temperature
    (arXiv 2409.02908).

    Args:
        log_p: Log probabilities [P, V].
        temperature: Temperature of `log_p`; only whether it is 0 matters.
        generator: Source of the noise.
        samples: int64 [P], the sample of each row, sorted; required if `generator` has one stream per sample.

    Returns:
        Token ids [P].
    """
    if temperature == 0:
        return log_p.argmax(-1)
    # The bound keeps the logarithm of a 0 finite.
    uniform = draw_uniform(generator, log_p.shape, torch.float64, samples).clamp_min(1e-300).to(log_p.device)
    return (log_p.double() - (-uniform.log()).log()).argmax(-1)
