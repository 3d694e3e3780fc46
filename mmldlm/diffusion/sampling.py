"""Generation: one loop over decreasing noise times for all modes, l2t, t2l and joint.

The given modality stays at t = 0. The other modality, or both, go from pure noise to data. The reverse steps are
methods of the objects that corrupt the data and weigh the losses in training.
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

# Part of error messages about classifier-free guidance.
GUIDANCE_NEEDS = "a run that trained joint: only there the network saw t = 1, the null condition, together with data"

DRAW_TEMPERATURE = 0.6  # default temperature if texts are drawn
ALONE_TEMPERATURE = 0.8  # the same for texts without a latent, which are less alike at it
MASKED_TEXTS = 64  # texts in a pass of `likely_tokens`
EQUAL_PASSES = 8  # of `likely_tokens` where every rank makes as many
MAX_PASSES = 10_000  # limit of settings, so that a stranger's bundle cannot ask for years of computation


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of generation."""

    steps: int = setting(
        32,
        "reverse steps. Decoding by confidence ends earlier if all tokens of a text are unmasked",
        at_least=1,
        at_most=MAX_PASSES,
        advice="Many more steps than tokens change little",
    )
    temperature: float | None = setting(
        None,
        "temperature of the token distributions; 0: take the most likely token. null: 0 if a latent gets one text, "
        "since random draws only add errors, or if joint draws a latent of several tokens first; otherwise 0.6",
        at_least=0,
        advice="1 if samples should follow the likelihood",
    )
    tried_lengths: int = setting(
        5,
        "l2t without a given length: number of lengths to try, around the length head's median. The text that "
        "fits the latent best is kept: by the latent that the encoder finds for it, or without an encoder the "
        "network, or if the run did not train t2l, by its likelihood",
        at_least=1,
        at_most=MAX_PASSES,
        advice="Time is proportional to it. 1 tries the median alone",
    )
    search: int | None = setting(
        None,
        "l2t, one text of a latent: rounds of edits that bring the latent of the text, by the run's encoder, nearer to "
        "the given one. A search ends earlier if no edit does. null: 8 with a learned or lsa encoder, otherwise 0",
        at_least=0,
        at_most=MAX_PASSES,
        advice="A round encodes about 10 texts for each token, which takes long with a large encoder",
    )
    doubled_words: Literal["avoid", "allow"] = setting(
        "avoid", "whether a generated word may stand next to itself. avoid: the position takes the next likely token"
    )
    top_p: float = setting(1.0, "draw tokens from the smallest set with this probability mass", above=0, at_most=1)
    guidance: float = setting(1.0, "classifier-free guidance scale (l2t and t2l); 1: no guidance", at_least=0)
    decoding: Literal["auto", TextDecoding] = setting(
        "auto",
        "order of unmasking. ancestral: at random, as in the reverse process. confidence: the most confident "
        "tokens first. auto: confidence in l2t, and in joint if latents come first and have several tokens and "
        "remask is 0; otherwise ancestral",
        advice="confidence generates better texts from a latent. ancestral if samples should follow the likelihood, as "
        "in joint",
    )
    commit: float = setting(
        0.999,
        "decoding confidence, texts of given latents: a step unmasks all tokens with a probability above this, and at "
        "least one of each text. 1: one token at a time, or more if a text has more tokens than steps",
        above=0,
        at_most=1,
        advice="Lower values are faster, and make more mistakes",
    )
    remask: float = setting(
        0.0, "fraction of the maximal remasking rate. It needs decoding ancestral", at_least=0, at_most=1
    )
    latent_sampler: LatentSampler = setting("ddim", "reverse step of the latents")
    t2l_steps: int | None = setting(
        None,
        "reverse steps of t2l; null: 1 if the prediction is x0, otherwise `steps`. A single step gives the mean "
        "of the latents that fit the text",
        at_least=1,
        at_most=MAX_PASSES,
        advice="More steps draw one of these latents, which is farther from the true latent than their mean",
    )
    joint_order: Literal["together", "latents_first", "text_first"] = setting(
        "latents_first",
        "order in joint. together: text and latents go through the same steps. latents_first: all steps of the "
        "latents come first, then the same number of steps of the text given the latents. text_first: all steps of the "
        "text, without a latent, then its latents as in t2l",
        advice="text_first writes the best texts if `latent.pure_noise` has trained texts without latents. If not, "
        "latents_first, or together for a run that is poor at l2t",
    )
    joint_latents: Literal["of_text", "drawn"] = setting(
        "of_text",
        "latents that joint returns under latents_first. drawn: the latents from which the text was generated, "
        "which may belong to no text. of_text: latents found from the finished text, as in t2l",
    )

    def __post_init__(self) -> None:
        if self.remask and self.decoding == "confidence":
            raise ValueError("remask: needs decoding ancestral, found confidence")

    def of_t2l(self, prediction: PredictionType) -> SamplingConfig:
        """Return the settings of t2l. If the network predicts x0, one reverse step is enough."""
        steps = self.t2l_steps or (1 if prediction == "x0" else self.steps)
        # A single DDIM step returns the estimate of x0 itself, while a single Euler step is far from it.
        return replace(self, steps=steps, latent_sampler="ddim" if steps == 1 else self.latent_sampler)

    def resolve_temperature(self, mode: Mode, latent_tokens: int, count: int = 1) -> float:
        """Return the temperature of a mode for `count` texts per latent, if a latent has `latent_tokens` tokens."""
        if self.temperature is not None:
            return self.temperature
        if count == 1 and self._is_determined(mode, latent_tokens):
            return 0.0
        return ALONE_TEMPERATURE if self.writes_alone(mode) else DRAW_TEMPERATURE

    def resolve_decoding(self, mode: Mode, latent_tokens: int) -> TextDecoding:
        """Return the decoding of a mode for latents of `latent_tokens` tokens.

        Decoding by confidence gives better texts if a latent determines their content. If nothing determines it, every
        text would collapse to the same few words, the most likely ones overall.
        """
        if self.decoding != "auto":
            return self.decoding
        return "confidence" if self._is_determined(mode, latent_tokens) and not self.remask else "ancestral"

    def writes_alone(self, mode: Mode) -> bool:
        """Return whether a mode writes texts without a latent, which stays noise meanwhile."""
        return mode == "joint" and self.joint_order == "text_first"

    def _is_determined(self, mode: Mode, latent_tokens: int) -> bool:
        """Return whether the latent determines the text. In joint it must come first and have several tokens."""
        return mode == "l2t" or (mode == "joint" and self.joint_order == "latents_first" and latent_tokens > 1)


# Called with the tokens of all texts, their lengths, and the noise time.
OnStep = Callable[[Tensor, tuple[int, ...], float], None]


@dataclass(frozen=True)
class Generation:
    """Generated samples. The given modality is returned unchanged."""

    tokens: Tensor  # int64 [N], on the host
    lengths: tuple[int, ...]
    latents: Tensor  # float32 [B, M, C], on the host, standardized
    # float64 [B], on the host: mean log likelihood of a generated token, given all tokens unmasked before it.
    log_p: Tensor
    passes: int  # how often the network ran, counted by sample

    def split(self) -> list[list[int]]:
        """Return the token ids of each sample."""
        return [part.tolist() for part in self.tokens.split(self.lengths)]


@dataclass(frozen=True)
class Sampler:
    """A trained network with its two processes, and how to generate with it."""

    model: Network
    text: MaskedDiffusion
    latent: GaussianDiffusion
    config: SamplingConfig
    words: Tensor | None = None  # bool [V], True for words. `doubled_words: avoid` places no word next to itself
    on_step: OnStep | None = None  # called at the start, and after each step that generates text
    every_step: bool = False  # run the network also where this rank needs no prediction: other ranks may need one

    @torch.no_grad()
    def generate(
        self, mode: Mode, generator: RandomSource, latents: Tensor, start: Sequence[Sequence[int]]
    ) -> Generation:
        """Generate B samples. Only [MASK] tokens change.

        Args:
            generator: A generator on the host, or one stream per sample. A seed gives the same numbers for any device.
            latents: [B, M, C], the condition in l2t. In other modes only its shape and device matter.
            start: Tokens of each sample: an optional prefix, which is a condition in every mode and is not returned,
                then the text. A mode that generates text needs at least one [MASK] in each sample.
        """
        config, text = self.config, self.text
        assert mode != "joint" or config.guidance == 1, "guidance needs a condition"
        tokens = torch.tensor([token for sample in start for token in sample])
        layout = PackedLayout(tuple(map(len, start)), latents.shape[1])
        is_text, text_lengths = text.find_texts(tokens, layout)
        lengths, texts = tuple(text_lengths.tolist()), is_text.nonzero().squeeze(1)
        if self.on_step is not None:
            self.on_step(tokens[texts], lengths, 1.0)
        given_text = config.of_t2l(self.latent.prediction_type)
        stages: list[tuple[Mode, SamplingConfig]] = [(mode, given_text if mode == "t2l" else config)]
        if mode == "joint" and config.joint_order == "latents_first":
            decoding = config.resolve_decoding("joint", latents.shape[1])
            temperature = config.resolve_temperature("joint", latents.shape[1])
            stages = [("t2l", config), ("l2t", replace(config, decoding=decoding, temperature=temperature))]
            stages += [("t2l", given_text)] if config.joint_latents == "of_text" else []
        elif config.writes_alone(mode):
            stages = [("joint", config), ("t2l", given_text)]
        log_p, passes = torch.full((len(start),), math.nan, dtype=torch.float64), 0
        for stage, settings in stages:
            sampler = replace(self, config=settings)
            tokens, latents, of_stage, more = sampler._reverse(stage, generator, latents, tokens, layout, texts)
            log_p, passes = log_p if of_stage is None else of_stage, passes + more
        return Generation(tokens[texts], lengths, latents.float().cpu(), log_p, passes)

    def _reverse(
        self, mode: Mode, generator: RandomSource, latents: Tensor, tokens: Tensor, layout: PackedLayout, texts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Run one reverse process of `generate`. `tokens`, `layout` and `texts` (positions of texts) are on the host.

        Returns:
            Tokens on the host, latents [B, M, C], `log_p` [B] on the host if texts were generated, and the passes.
        """
        text, latent, config = self.text, self.latent, self.config
        words = self.words if config.doubled_words == "avoid" else None
        device, batch = latents.device, latents.shape[0]
        is_masked = tokens == text.mask_id
        counts = tuple(int(part.sum()) for part in is_masked.split(layout.lengths))
        lengths = layout.sample_of_token[texts].bincount(minlength=batch)
        text_lengths = tuple(lengths.tolist())
        lengths = lengths.to(device)
        # The network gets the time at which training would mask this fraction of a text. (The optimal prediction
        # depends only on which tokens are masked, not on the time: RADD, arXiv 2406.03736, theorem 1. But this network
        # was trained with matching times.)
        fraction = torch.tensor(counts, device=device) / lengths
        layout, x, texts = layout.to(device), tokens.to(device), texts.to(device)
        grid = torch.linspace(1, 0, config.steps + 1).tolist()
        # We draw noise in every mode: generated latents start from it, and it is the null condition of l2t guidance.
        noise = draw_normal(generator, latents.shape).to(device)
        is_alone = config.writes_alone(mode)
        generates_text, generates_latent = mode != "t2l", mode != "l2t" and not is_alone
        z = latents if mode == "l2t" else latent.prior(noise)
        temperature = config.resolve_temperature(mode, latents.shape[1])
        by_confidence = generates_text and config.resolve_decoding(mode, latents.shape[1]) == "confidence"
        if generates_text:  # the reverse steps treat the masked tokens of each sample as a text
            places, masked = is_masked.nonzero().squeeze(1).to(device), PackedLayout(counts, latents.shape[1], device)
            uniforms = draw_uniform(generator, config.steps, counts)
            decoder = (
                ConfidenceDecoder(text, grid, uniforms, masked, config.commit if mode == "l2t" else None)
                if by_confidence
                else AncestralDecoder(text, grid, uniforms, config.remask, device)
            )
            log_p = torch.zeros(len(places), dtype=torch.float64, device=device)
        # The null condition is t = 1 of the given modality: noise as latents, or only [MASK] as text.
        null = noise if mode == "l2t" else x.index_fill(0, texts, text.mask_id)
        passes = 0
        # Ancestral decoding: no step waits for the device or exchanges data with it.
        for step, (t, s) in enumerate(pairwise(grid)):
            positions, running = x.new_empty(0), None
            t_text, t_latent = fraction, torch.full_like(fraction, t if generates_latent else float(is_alone))
            if generates_text:
                # Only tokens to generate take the reverse step: the rest of a template never changes.
                before = x[places]
                rows = decoder.rows(step, before)
                positions, t_text = places[rows], t * fraction
            if by_confidence:
                remaining = masked.sample_of_token[rows].bincount(minlength=batch)
                t_text = remaining / lengths
                if not generates_latent and not self.every_step:
                    running = remaining.nonzero().squeeze(1).tolist()  # finished texts leave the batch
            drawn, confidence = positions, z.new_empty(0)  # empty, unless the network runs
            if generates_latent or len(positions) or self.every_step:  # otherwise nobody uses the prediction
                passes += (batch if running is None else len(running)) * (1 + (config.guidance != 1))
                inputs = x, z, t_text, t_latent, layout, positions
                logits, latent_pred = self._predict(mode, inputs, null, running)
                if generates_latent:
                    z = latent.reverse_step(
                        latent_pred, z, t_latent, torch.full_like(t_latent, s), config.latent_sampler
                    )
                if generates_text:
                    if words is not None:
                        logits = without_neighbors(logits, x, positions, layout, words)
                    drawn, confidence = draw_tokens(logits, decoder.uniforms(step, rows), temperature, config.top_p)
                    log_p = log_p.index_copy(0, rows, confidence)  # the last value of a position is its token's
                    if words is not None:
                        confidence = hold_back_doubles(confidence, drawn, positions, layout, words)
            if generates_text:
                x = x.index_copy(0, places, decoder.update(step, before, rows, drawn, confidence))
                if self.on_step is not None:
                    self.on_step(x[texts], text_lengths, s)
        if not generates_text:
            return tokens, z, None, passes
        sums = torch.zeros(batch, dtype=torch.float64, device=device).index_add(0, masked.sample_of_token, log_p)
        return x.cpu(), z, (sums / torch.tensor(counts, device=device)).cpu(), passes

    def _predict(
        self,
        mode: Mode,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, PackedLayout, Tensor],
        null: Tensor,
        samples: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the network's logits [P, V] and latents, guided by the null condition.

        Args:
            inputs: Tokens, latents, their times, the layout, and the P positions to predict.
            null: Latents in l2t, otherwise tokens.
            samples: Run the network on these samples alone, in ascending order. All positions to predict are theirs.
        """
        x, z, t_text, t_latent, layout, positions = inputs
        if samples is not None and len(samples) < layout.num_samples:
            layout, places = layout.take(samples)
            taken, places = torch.tensor(samples, device=x.device), places.to(x.device)
            positions = torch.empty_like(x).index_copy(0, places, torch.arange(len(places), device=x.device))[positions]
            x, z, t_text, t_latent, null = x[places], z[taken], t_text[taken], t_latent[taken], null[taken]
        logits, latent_pred, *_ = self.model(x, z, t_text, t_latent, layout, positions, None)
        scale = self.config.guidance
        if scale != 1 and mode == "l2t":
            unconditional, *_ = self.model(x, null, t_text, torch.ones_like(t_latent), layout, positions, None)
            logits = unconditional + scale * (logits - unconditional)
        elif scale != 1:
            _, unconditional, *_ = self.model(null, z, torch.ones_like(t_text), t_latent, layout, positions, None)
            latent_pred = self.latent.guide(latent_pred, unconditional, t_latent, scale)
        return logits, latent_pred

    @torch.no_grad()
    def likely_tokens(self, latents: Tensor, texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` likeliest tokens, the best first, for the one [MASK] of each of n texts.

        The latents are [n, M, C]. A text is given as tokens, after an optional prefix.
        """
        order, device = sorted(range(len(texts)), key=lambda row: len(texts[row])), latents.device
        parts = [order[first : first + MASKED_TEXTS] for first in range(0, len(order), MASKED_TEXTS)]
        if self.every_step:
            parts = [order[first::EQUAL_PASSES] for first in range(EQUAL_PASSES)]
        found: dict[int, list[int]] = {}
        for rows in parts:
            masked = [texts[row] for row in rows] or [[self.text.mask_id]]
            given = latents[rows] if rows else latents.new_zeros(1, *latents.shape[1:])
            tokens = torch.tensor([token for text in masked for token in text])
            layout = PackedLayout(tuple(map(len, masked)), latents.shape[1])
            _, lengths = self.text.find_texts(tokens, layout)
            layout, tokens, fraction = layout.to(device), tokens.to(device), (1 / lengths).to(device)
            positions = (tokens == self.text.mask_id).nonzero().squeeze(1)
            logits, *_ = self.model(tokens, given, fraction, torch.zeros_like(fraction), layout, positions, None)
            if self.words is not None and self.config.doubled_words == "avoid":
                logits = without_neighbors(logits, tokens, positions, layout, self.words)
            # The pass of a rank without texts has one row that nobody asked for.
            found |= zip(rows, logits.topk(min(count, logits.shape[1])).indices.tolist(), strict=False)
        return [found[row] for row in range(len(texts))]


@torch.no_grad()
def length_probabilities(model: Network, mask_id: int, latents: Tensor, t_latent: float) -> Tensor:
    """Return p(L) by the length head for latents [B, M, C] at noise time `t_latent`, [B, max_length] on the host."""
    batch, device = latents.shape[0], latents.device
    layout = PackedLayout((1,) * batch, latents.shape[1], device)
    tokens = torch.full((batch,), mask_id, device=device)  # a placeholder, since the head does not see the text
    ones = torch.ones(batch, device=device)
    _, _, logits, *_ = model(tokens, latents, ones, ones * t_latent, layout, tokens.new_empty(0), None)
    return logits.float().softmax(-1).cpu()


def draw_lengths(model: Network, mask_id: int, latents: Tensor, generator: RandomSource) -> tuple[int, ...]:
    """Return a length for each sample, drawn from the length head's distribution given noise [B, M, C]."""
    p = length_probabilities(model, mask_id, latents, 1.0)
    if isinstance(generator, torch.Generator):
        return tuple((torch.multinomial(p, 1, generator=generator).squeeze(1) + 1).tolist())
    quantile = draw_uniform(generator, 1, (1,) * len(p)).T
    return tuple(((p.cumsum(-1) < quantile).sum(-1).clamp_max(p.shape[-1] - 1) + 1).tolist())


def median_lengths(p: Tensor) -> Tensor:
    """Return the median of each distribution of lengths [B, max_length], int64 [B]. It has the least expected error."""
    return (p.cumsum(-1) < 0.5).sum(-1).clamp_max(p.shape[-1] - 1) + 1
