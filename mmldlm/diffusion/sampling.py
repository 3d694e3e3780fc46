"""Generation: one loop over decreasing noise times for all modes, l2t, t2l and joint.

The given modality stays at t = 0. The other one, or both, go from pure noise to data by the reverse steps of the same
objects that corrupt the data and weigh the losses in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.decoding import (
    AncestralDecoder,
    ConfidenceDecoder,
    TextDecoding,
    draw_tokens,
    hold_back_doubles,
    without_neighbors,
)
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentSampler, PredictionType
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode, RandomSource, draw_normal, draw_uniform
from mmldlm.diffusion.objective import Network
from mmldlm.settings.declaration import setting

# Part of error messages: what classifier-free guidance requires.
GUIDANCE_NEEDS = "a run that trained joint: only there the network saw t = 1, the null condition, together with data"

DRAW_TEMPERATURE = 0.6  # where texts are drawn, by default


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of generation."""

    steps: int = setting(
        32,
        "reverse steps",
        at_least=1,
        advice="Time is proportional to it; many more steps than tokens to generate change little",
    )
    temperature: float | None = setting(
        None,
        "temperature of the token distributions; 0: the most likely token; null: 0 for one text of a latent, where "
        "draws only add errors, and for that of several latent tokens in joint, otherwise 0.6",
        at_least=0,
        advice="1 if samples should follow the likelihood",
    )
    lengths: int = setting(
        5,
        "l2t without a given length: lengths around the length head's median at which texts are generated; the text "
        "that fits the latent best is kept, by the encoder's latent of it, or by its likelihood without an encoder",
        at_least=1,
        advice="Time is proportional to it; 1: the median alone",
    )
    search: int | None = setting(
        None,
        "l2t, with the run's encoder: how many texts are generated for one latent; after `lengths` of them, tokens of "
        "the best one that fit the latent worst are masked and generated again; null: `lengths` alone",
        at_least=1,
        advice="16 takes about twice the time of the default, 64 five times. It pays where a latent determines its "
        "text, as learned latents of several tokens do",
    )
    doubled_words: Literal["avoid", "allow"] = setting(
        "avoid", "whether a generated word may stand next to itself; avoid: the position takes the next likely token"
    )
    top_p: float = setting(1.0, "tokens are drawn from the smallest set with this probability mass", above=0, at_most=1)
    guidance: float = setting(1.0, "classifier-free guidance scale (l2t and t2l); 1: none", at_least=0)
    decoding: Literal["auto", TextDecoding] = setting(
        "auto",
        "order in which tokens are unmasked; ancestral: at random, as in the reverse process; confidence: the most "
        "confident first; auto: confidence in l2t, and in joint where latents come first and have several tokens, "
        "without remask; otherwise ancestral",
        advice="confidence generates better texts from a latent; ancestral if samples should follow the likelihood, "
        "as in joint",
    )
    remask: float = setting(
        0.0, "fraction of the maximal remasking rate; not with decoding confidence", at_least=0, at_most=1
    )
    latent_sampler: LatentSampler = setting("ddim", "reverse step of the latents")
    t2l_steps: int | None = setting(
        None,
        "reverse steps of t2l; null: 1 if the prediction is x0, which gives the mean of the latents that fit the text, "
        "otherwise `steps`",
        at_least=1,
        advice="More steps draw one of those latents, which is farther from the true one than their mean",
    )
    joint_order: Literal["together", "latents_first"] = setting(
        "latents_first",
        "joint; together: text and latents by the same steps; latents_first: all steps of the latents, then as many of "
        "the text given them",
        advice="latents_first takes twice the passes; its texts agree better with their latents and are more diverse. "
        "together for a run that is poor at l2t",
    )
    joint_latents: Literal["of_text", "drawn"] = setting(
        "of_text",
        "joint with latents_first; drawn: the latents that the text is generated from, which may be those of no text; "
        "of_text: at last they are found from that text, as in t2l",
    )

    def __post_init__(self) -> None:
        if self.remask and self.decoding == "confidence":
            raise ValueError("remask: needs decoding ancestral, found confidence")

    def of_t2l(self, prediction: PredictionType) -> SamplingConfig:
        """Return the settings of t2l; one reverse step is enough where the network predicts x0 itself."""
        steps = self.t2l_steps or (1 if prediction == "x0" else self.steps)
        # A single step of DDIM is the estimate of x0 itself, one of Euler is far from it.
        return replace(self, steps=steps, latent_sampler="ddim" if steps == 1 else self.latent_sampler)

    def resolve_temperature(self, mode: Mode, latent_tokens: int, count: int = 1) -> float:
        """Return the temperature of a mode, for `count` texts of each latent, which has `latent_tokens`."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if count == 1 and self._is_determined(mode, latent_tokens) else DRAW_TEMPERATURE

    def resolve_decoding(self, mode: Mode, latent_tokens: int) -> TextDecoding:
        """Return the decoding of a mode, for latents of `latent_tokens`.

        Decoding by confidence gives better texts where a latent determines their content. Where nothing does, every
        text would collapse to what is most likely overall: the same few words.
        """
        if self.decoding != "auto":
            return self.decoding
        return "confidence" if self._is_determined(mode, latent_tokens) and not self.remask else "ancestral"

    def _is_determined(self, mode: Mode, latent_tokens: int) -> bool:
        """Return whether a text follows from its latent: in joint from one of several tokens that comes first."""
        return mode == "l2t" or (mode == "joint" and self.joint_order == "latents_first" and latent_tokens > 1)


@dataclass(frozen=True)
class Generation:
    """Generated samples; the modality that was given is returned unchanged."""

    tokens: Tensor  # int64 [N], on the host
    lengths: tuple[int, ...]
    latents: Tensor  # float32 [B, M, C], on the host, standardized
    # float64 [B], on the host: mean log likelihood of a generated token, given those that were unmasked before it.
    log_p: Tensor
    passes: int  # of the network, each of one sample

    def split(self) -> list[list[int]]:
        """Return the token ids of each sample."""
        return [part.tolist() for part in self.tokens.split(self.lengths)]


@dataclass(frozen=True)
class MaskedPositions:
    """Tokens to generate: those that are [MASK] at the start.

    The reverse steps treat them as separate texts. The network gets the time at which training masks as many tokens
    of a text: t times the fraction of masked tokens, where a prefix does not count. (The optimal prediction depends
    only on which tokens are masked, not on the time: RADD, arXiv 2406.03736, theorem 1. But this network was trained
    with matching times.)
    """

    positions: Tensor  # int64 [F]
    layout: PackedLayout  # of these tokens alone
    fraction: Tensor  # float32 [B]: of each text's tokens

    @classmethod
    def from_tokens(
        cls, tokens: Tensor, mask_id: int, layout: PackedLayout, text_lengths: tuple[int, ...]
    ) -> MaskedPositions:
        """Find [MASK] in `tokens` [N], on the host; the result is on the device of `layout`."""
        is_masked = tokens == mask_id
        lengths = tuple(int(part.sum()) for part in is_masked.split(layout.lengths))
        fraction = torch.tensor(lengths) / torch.tensor(text_lengths)
        masked_layout = PackedLayout(lengths, layout.latent_tokens, layout.device)
        return cls(is_masked.nonzero().squeeze(1).to(layout.device), masked_layout, fraction.to(layout.device))


@torch.no_grad()
def generate(
    model: Network,
    text: MaskedDiffusion,
    latent: GaussianDiffusion,
    mode: Mode,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    lengths: tuple[int, ...],
    tokens: Tensor | None = None,
    on_step: Callable[[float, Tensor], None] | None = None,
    template: Tensor | None = None,
    words: Tensor | None = None,
    every_step: bool = False,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Generation:
    """Generate B samples of known lengths, which do not count prefixes.

    Args:
        generator: A generator on the host, or one stream per sample; a seed gives the same numbers for any device.
        latents: [B, M, C], the condition in l2t. In other modes only its shape and device matter.
        lengths: Tokens of each sample; N is their sum.
        tokens: [N], the condition in t2l.
        on_step: Called with (t, tokens) after each step that generates text.
        template: [N], text to infill. Only its [MASK] tokens change; each sample has at least one.
        words: bool [V], tokens that are words; under `doubled_words: avoid` none is placed next to itself.
        every_step: Run the network also in steps that need no prediction, where other ranks may need one.
        prefixes: Conditions that stand before the texts, as tokens with the one that ends each. They are not returned.
    """
    assert mode != "joint" or config.guidance == 1, "guidance needs a condition"
    passes, comes_first = 0, mode == "joint" and config.joint_order == "latents_first"
    known = tokens if mode == "t2l" else template
    known = torch.full((sum(lengths),), text.mask_id) if known is None else known.cpu()
    start = _Start.of_texts(known, lengths, prefixes or [()] * len(lengths))
    if comes_first:
        _, latents, _, passes = _reverse(
            model, text, latent, "t2l", config, generator, latents, start, every_step=every_step
        )
        tokens_each = latents.shape[1]
        decoding = config.resolve_decoding("joint", tokens_each)
        temperature = config.resolve_temperature("joint", tokens_each)
        mode, config = "l2t", replace(config, decoding=decoding, temperature=temperature)
    elif mode == "t2l":
        config = config.of_t2l(latent.prediction_type)
    words = words if config.doubled_words == "avoid" else None
    x, z, log_p, more = _reverse(
        model, text, latent, mode, config, generator, latents, start, on_step, words, every_step
    )
    passes += more
    if comes_first and config.joint_latents == "of_text":
        config = config.of_t2l(latent.prediction_type)
        start = replace(start, tokens=x.cpu())
        _, z, _, more = _reverse(model, text, latent, "t2l", config, generator, z, start, every_step=every_step)
        passes += more
    return Generation(x.cpu()[start.text], lengths, z.float().cpu(), log_p.cpu(), passes)


@dataclass(frozen=True)
class _Start:
    """Samples as the reverse process finds them, on the host: texts, perhaps masked, behind their prefixes."""

    tokens: Tensor  # int64 [N']
    lengths: tuple[int, ...]  # of the samples
    text: Tensor  # int64 [N], places of the texts' tokens
    text_lengths: tuple[int, ...]

    @classmethod
    def of_texts(cls, tokens: Tensor, lengths: tuple[int, ...], prefixes: Sequence[Sequence[int]]) -> _Start:
        pairs = [*zip(prefixes, tokens.split(lengths), strict=True)]
        whole = torch.cat([part for prefix, own in pairs for part in (tokens.new_tensor(prefix), own)])
        is_text = torch.cat([torch.arange(len(prefix) + len(own)) >= len(prefix) for prefix, own in pairs])
        return cls(whole, tuple(len(prefix) + len(own) for prefix, own in pairs), is_text.nonzero().squeeze(1), lengths)


def _reverse(
    model: Network,
    text: MaskedDiffusion,
    latent: GaussianDiffusion,
    mode: Mode,
    config: SamplingConfig,
    generator: RandomSource,
    latents: Tensor,
    start: _Start,
    on_step: Callable[[float, Tensor], None] | None = None,
    words: Tensor | None = None,
    every_step: bool = False,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Run the reverse process of `generate`; return tokens [N'], latents [B, M, C], `log_p` [B] and passes."""
    device, batch = latents.device, latents.shape[0]
    layout = PackedLayout(start.lengths, latents.shape[1], device)
    x, texts = start.tokens.to(device), start.text.to(device)
    grid = torch.linspace(1, 0, config.steps + 1).tolist()
    # Drawn in every mode: the start of generated latents, or the null condition of l2t under guidance.
    noise = draw_normal(generator, latents.shape).to(device)
    generates_text, generates_latent = mode != "t2l", mode != "l2t"
    z = latent.prior(noise) if generates_latent else latents
    if generates_text:
        masked = MaskedPositions.from_tokens(start.tokens, text.mask_id, layout, start.text_lengths)
        uniforms = draw_uniform(generator, config.steps, masked.layout.lengths)
        decoder = (
            ConfidenceDecoder(text, grid, uniforms, masked.layout)
            if config.resolve_decoding(mode, latents.shape[1]) == "confidence"
            else AncestralDecoder(text, grid, uniforms, config.remask, device)
        )
    else:
        is_masked = (start.tokens[start.text] == text.mask_id).float().split(start.text_lengths)
        given_time = torch.stack([each.mean() for each in is_masked]).to(device)
    all_masked, temperature = x.index_fill(0, texts, text.mask_id), config.resolve_temperature(mode, latents.shape[1])
    log_p = torch.zeros(len(masked.positions) if generates_text else 0, dtype=torch.float64, device=device)

    def times(value: float) -> Tensor:
        return torch.full((batch,), value, device=device)

    passes = 0
    # No step waits for the device, and none exchanges data with it.
    for step, (t, s) in enumerate(pairwise(grid)):
        positions = x.new_empty(0)
        if generates_text:
            # Only tokens to generate take the reverse step: the rest of a template never changes.
            before = x[masked.positions]
            rows = decoder.rows(step, before)
            positions = masked.positions[rows]
        t_text, t_latent = t * masked.fraction if generates_text else given_time, times(t if generates_latent else 0.0)
        drawn, confidence = positions, z.new_empty(0)  # of no position, unless the network runs
        if generates_latent or len(positions) or every_step:  # otherwise the prediction is not used
            logits, latent_pred, *_ = model(x, z, t_text, t_latent, layout, positions, None)
            passes += batch * (1 + (config.guidance != 1))
            # The null condition is t = 1 of the given modality: noise as latents, or only [MASK] as text.
            if config.guidance != 1:
                if mode == "l2t":
                    unconditional, *_ = model(x, noise, t_text, times(1.0), layout, positions, None)
                    logits = unconditional + config.guidance * (logits - unconditional)
                else:
                    _, unconditional, *_ = model(all_masked, z, times(1.0), t_latent, layout, positions, None)
                    latent_pred = latent.guide(latent_pred, unconditional, times(t), config.guidance)
            if generates_latent:
                z = latent.reverse_step(latent_pred, z, times(t), times(s), config.latent_sampler)
            if generates_text:
                if words is not None:
                    logits = without_neighbors(logits, x, positions, layout, words)
                drawn, confidence = draw_tokens(logits, decoder.uniforms[step], temperature, config.top_p)
                log_p = log_p.index_copy(0, rows, confidence)  # the last one of a position is that of its token
                if words is not None:
                    confidence = hold_back_doubles(confidence, drawn, positions, layout, words)
        if generates_text:
            x = x.index_copy(0, masked.positions, decoder.update(step, before, rows, drawn, confidence))
            if on_step is not None:
                on_step(s, x[texts])
    if not generates_text:
        return x, z, torch.full((batch,), math.nan, dtype=torch.float64), passes
    sums = torch.zeros(batch, dtype=torch.float64, device=device)
    sums = sums.index_add(0, masked.layout.sample_of_token, log_p)
    return x, z, sums / torch.tensor(masked.layout.lengths, device=device), passes


@torch.no_grad()
def length_probabilities(model: Network, mask_id: int, latents: Tensor, t_latent: float) -> Tensor:
    """Return p(L) by the length head for latents [B, M, C] at noise time `t_latent`, [B, max_length] on the host."""
    batch, device = latents.shape[0], latents.device
    layout = PackedLayout((1,) * batch, latents.shape[1], device)
    tokens = torch.full((batch,), mask_id, device=device)  # placeholder: the head does not see the text
    ones = torch.ones(batch, device=device)
    _, _, logits, *_ = model(tokens, latents, ones, ones * t_latent, layout, tokens.new_empty(0), None)
    return logits.float().softmax(-1).cpu()


def draw_lengths(
    model: Network, mask_id: int, latents: Tensor, t_latent: float, generator: RandomSource
) -> tuple[int, ...]:
    """Return a length for each sample from the length head, given its latents [B, M, C] at noise time `t_latent`.

    For clean latents (t_latent = 0) it is the median of the head's distribution, which minimizes the expected absolute
    error. For noised latents it is drawn from the distribution, as lengths vary without a condition.
    """
    p = length_probabilities(model, mask_id, latents, t_latent)
    if t_latent == 0:
        return tuple(median_lengths(p).tolist())
    if isinstance(generator, torch.Generator):
        return tuple((torch.multinomial(p, 1, generator=generator).squeeze(1) + 1).tolist())
    quantile = draw_uniform(generator, 1, (1,) * len(p)).T
    return tuple(((p.cumsum(-1) < quantile).sum(-1).clamp_max(p.shape[-1] - 1) + 1).tolist())


def median_lengths(p: Tensor) -> Tensor:
    """Return the median of each distribution of lengths [B, max_length], int64 [B]."""
    return (p.cumsum(-1) < 0.5).sum(-1).clamp_max(p.shape[-1] - 1) + 1
