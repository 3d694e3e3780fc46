"""Text: masked (absorbing-state) diffusion; corruption, loss, reverse steps (MDLM, arXiv 2406.07524).

Shapes: tokens [N] of an unpadded micro-batch, t [B] noise times of its samples, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.noise import Randomness, draw_uniform
from mmldlm.diffusion.schedule import MOST_MODE_SCALE, LogLinear, TimeSampler, check_sampler
from mmldlm.settings.fields import setting

TextLoss = Literal["elbo", "masked_mean"]
TextDecoding = Literal["ancestral", "confidence"]
Masks = Literal["independent", "exact"]


@dataclass(frozen=True)
class TextConfig:
    time_sampling: Literal["uniform", "mode"] = setting(
        "uniform",
        "distribution of t_text in training; mode: more of the middle, with `loss.text: elbo` weighted by one over the "
        "density, so that the bound stays one",
    )
    mode_scale: float = setting(
        1.29, "mode: 0 is uniform, more is more of the middle, less of the ends", above=-1, below=MOST_MODE_SCALE
    )
    stratified: bool = setting(
        True, "t_text from a low-discrepancy grid over the global batch; false: each sample's by itself"
    )

    masks: Masks = setting(
        "independent",
        "independent: each token is masked with probability t_text; exact: t_text of a text's tokens, rounded up, with "
        "which the bound is the same and varies far less",
    )

    def __post_init__(self) -> None:
        check_sampler(self.sampler)

    @property
    def sampler(self) -> TimeSampler:
        return TimeSampler(self.time_sampling, mode_scale=self.mode_scale, stratified=self.stratified)


class MaskedDiffusion:
    def __init__(self, mask_id: int, loss: TextLoss, masks: Masks = "independent"):
        self.mask_id = mask_id
        self.loss_kind = loss
        self.masks = masks
        self.schedule = LogLinear()

    def masked(self, uniforms: Tensor, t: Tensor, sample_of_token: Tensor) -> Tensor:
        """bool [N]: which tokens are masked at time t, given one uniform number each (float32 [N]).

        Tokens of a sample lie one behind the other. With exact masks those with the smallest numbers are masked.
        """
        if self.masks == "exact":
            lengths = torch.bincount(sample_of_token, minlength=len(t))
            by_number = uniforms.argsort()
            order = by_number[sample_of_token[by_number].argsort(stable=True)]
            rank = torch.empty_like(order)
            rank[order] = torch.arange(len(order)) - (lengths.cumsum(0) - lengths)[sample_of_token[order]]
            return rank < _exact_counts(t, lengths)[sample_of_token]
        return uniforms < (1 - self.schedule.alpha(t))[sample_of_token].to(uniforms.dtype)

    def corrupt(self, tokens: Tensor, masked: Tensor) -> Tensor:
        return tokens.masked_fill(masked, self.mask_id)

    def weights(self, t: Tensor, lengths: Tensor, importance: Tensor, limit: float = math.inf) -> Tensor:
        """[B]: weight of each masked token's negative log likelihood.

        `elbo`: -alpha' / (1 - alpha), whose sum over masked tokens is an unbiased estimate of the negative
        ELBO of the text in nats (MDLM, eq. 10; MD4, arXiv 2406.04329, eq. 5), times `importance`, one over
        the density of the times; with a `limit` it is biased. `masked_mean`: 1.

        With exact masks it is L / n for n of L tokens. Uniform times make n uniform in 1..L, and the sum an estimate of
        the same bound: that of an order of the tokens drawn at random (arXiv 2110.02037, eq. 6).
        """
        if self.loss_kind != "elbo":
            return torch.ones_like(t)
        if self.masks == "exact":
            per_token = lengths / _exact_counts(t, lengths).clamp_min(1)
        else:
            per_token = self.schedule.elbo_weight(t)
        return per_token.clamp_max(limit) * importance

    # --- reverse ----------------------------------------------------------------------------------------

    def unmask_probability(self, t: float, s: float, remask: float) -> tuple[float, float]:
        """Probabilities, going from time t to s < t, that a masked token is written and a written one masked again.

        `remask` = eta in [0, 1] of ReMDM (arXiv 2503.00307, eq. 8 with sigma = eta x its largest value); 0 is
        the plain reverse process (MDLM, eq. 7).
        """
        alpha_t, alpha_s = 1 - t, 1 - s
        sigma = 0.0 if alpha_t <= 0 else remask * min(1.0, (1 - alpha_s) / alpha_t)
        return (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t), sigma

    def choose(
        self,
        noised: Tensor,
        t: float,
        s: float,
        layout: PackedLayout,
        decoding: TextDecoding,
        remask: float,
        generator: Randomness,
    ) -> tuple[Tensor, Tensor]:
        """bool [N] each, before the network is asked: the tokens that a step from t to s may write, and those that it
        masks again.

        `ancestral`: each masked token with the probability of the reverse process, so the network is asked for these
        alone. `confidence`: all masked ones. At s = 0 nothing stays masked.
        """
        is_masked = noised == self.mask_id
        if s <= 0 or decoding == "confidence":
            assert remask == 0 or decoding == "ancestral", "confidence-based decoding has no remasking"
            return is_masked, torch.zeros_like(is_masked)
        write, mask_again = self.unmask_probability(t, s, remask)
        chance = draw_uniform(generator, noised.shape, torch.float32, layout.sample_of_token).to(noised.device)
        return is_masked & (chance < write), ~is_masked & (chance < mask_again)

    def reverse_step(
        self,
        noised: Tensor,
        proposal: Tensor,
        confidence: Tensor,
        chosen: tuple[Tensor, Tensor],
        s: float,
        layout: PackedLayout,
        decoding: TextDecoding,
    ) -> Tensor:
        """Tokens [N] at time s, given what was chosen, and of what may be written a proposed token and its log
        probability [N].

        `confidence`: the surest tokens first, as many as the schedule has written by s (MaskGIT, arXiv
        2202.04200, section 3.2).
        """
        write, mask_again = chosen
        if decoding == "confidence" and s > 0:
            write = write & self._surest(write, confidence, s, layout)
        return torch.where(write, proposal, noised).masked_fill(mask_again, self.mask_id)

    def _surest(self, is_masked: Tensor, confidence: Tensor, s: float, layout: PackedLayout) -> Tensor:
        """bool [N]: the masked tokens to write now, so that each sample keeps round(s L) masked ones."""
        choice = torch.zeros_like(is_masked)
        start = 0
        for length in layout.lengths:
            part = slice(start, start + length)
            masked = is_masked[part]
            count = max(0, int(masked.sum()) - round(s * length))
            surest = confidence[part].masked_fill(~masked, float("-inf")).topk(count).indices
            choice[part][surest] = True
            start += length
        return choice


def _exact_counts(t: Tensor, lengths: Tensor) -> Tensor:
    """int64 [B]: t of each sample's tokens, rounded up."""
    return (t.double() * lengths).ceil().long()


def sharpen(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log probabilities [P, V] at a temperature, cut to the smallest set with mass `top_p` (arXiv 1904.09751).

    At temperature 0 `draw_tokens` takes the likeliest token; how sure it is, which confidence-based decoding
    asks, is then what the network says untempered.
    """
    log_p = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if top_p >= 1:
        return log_p
    ordered, index = log_p.sort(-1, descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    cut = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, index, mass_before >= top_p)
    return log_p.masked_fill(cut, float("-inf")).log_softmax(-1)


def draw_tokens(log_p: Tensor, temperature: float, generator: Randomness, samples: Tensor | None = None) -> Tensor:
    """One token a row [P]: the likeliest at temperature 0, else by the Gumbel-max trick in float64.

    `samples` [P] says whose each row is, where each sample has a stream of its own.

    float64: in lower precision Gumbel noise cuts the tails, which lowers the temperature unasked
    (arXiv 2409.02908).
    """
    if temperature == 0:
        return log_p.argmax(-1)
    uniform = draw_uniform(generator, log_p.shape, torch.float64, samples).clamp_min(1e-300).to(log_p.device)
    return (log_p.double() - (-uniform.log()).log()).argmax(-1)
