"""Generation: one loop over falling noise times that serves l2t, t2l and joint.

The pinned modality stays at t = 0; the other, or both, go from pure noise to data by the reverse steps of
the same objects that corrupt and weigh in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentSampler
from mmldlm.diffusion.masked import MaskedDiffusion, TextDecoding, draw_tokens, sharpen
from mmldlm.diffusion.noise import Mode, Randomness, draw_normal
from mmldlm.diffusion.objective import Network
from mmldlm.settings.fields import setting

# A message's part: why guidance is refused elsewhere.
GUIDANCE_NEEDS = "a run that trained joint: only there t = 1, the null condition, was seen beside data"


@dataclass(frozen=True)
class SamplingConfig:
    steps: int = setting(32, "reverse steps", at_least=1)
    temperature: float = setting(1.0, "temperature of the token distributions; 0: the likeliest token", at_least=0)
    top_p: float = setting(1.0, "tokens are drawn from the smallest set with this mass", above=0, at_most=1)
    guidance: float = setting(1.0, "classifier-free guidance scale (l2t and t2l); 1: none", at_least=0)
    decoding: Literal["auto", TextDecoding] = setting(
        "auto",
        "order in which tokens are written; ancestral: at random, as in the reverse process; confidence: the surest "
        "first; auto: confidence in l2t without remask, else ancestral",
    )
    remask: float = setting(
        0.0, "fraction of the largest remasking rate; not with decoding confidence", at_least=0, at_most=1
    )
    latent_sampler: LatentSampler = setting("ddim", "reverse step of the latents")

    def __post_init__(self) -> None:
        if self.remask and self.decoding == "confidence":
            raise ValueError("remask: needs decoding ancestral, found confidence")

    def decoding_of(self, mode: Mode) -> TextDecoding:
        """Return the decoding of a mode.

        By confidence texts are better where a latent says what they are about. In joint nothing does, and each text
        would become what is likeliest of all: the same few words.
        """
        if self.decoding != "auto":
            return self.decoding
        return "confidence" if mode == "l2t" and not self.remask else "ancestral"


@dataclass(frozen=True)
class Generation:
    tokens: Tensor  # int64 [N], on the host
    lengths: tuple[int, ...]
    latents: Tensor  # float32 [B, M, C], on the host, standardized

    def split(self) -> list[list[int]]:
        return [part.tolist() for part in self.tokens.split(self.lengths)]


@dataclass(frozen=True)
class Blank:
    """What is to be written: all of the texts, or the part that is masked at the start.

    The reverse steps apply to it as to texts of its own. The network is told the time at which training masks as many
    tokens of a text: t times the blank's share. (What is masked decides alone what the best network predicts, not the
    time: RADD, arXiv 2406.03736, theorem 1. Ours was trained with the two in step.)
    """

    places: Tensor  # int64 [F]
    layout: PackedLayout  # of these tokens alone
    share: Tensor  # float32 [B]: of each sample's tokens

    @classmethod
    def of(cls, tokens: Tensor, mask_id: int, layout: PackedLayout) -> Blank:
        places = (tokens == mask_id).nonzero().squeeze(1)
        lengths = torch.bincount(layout.sample_of_token[places], minlength=layout.num_samples).tolist()
        share = torch.tensor(lengths, device=tokens.device) / torch.tensor(layout.lengths, device=tokens.device)
        return cls(places, PackedLayout(tuple(lengths), layout.latent_tokens, tokens.device), share)


@torch.no_grad()
def generate(
    model: Network,
    text: MaskedDiffusion,
    latent: GaussianDiffusion,
    mode: Mode,
    config: SamplingConfig,
    generator: Randomness,
    latents: Tensor,
    lengths: tuple[int, ...],
    tokens: Tensor | None = None,
    on_step: Callable[[float, Tensor], None] | None = None,
    kept: Tensor | None = None,
) -> Generation:
    """Denoise B samples of known lengths.

    `latents` [B, M, C]: the condition in l2t; otherwise only its shape and device count. `tokens` [N]: the
    condition in t2l. `generator` is a host generator, or a stream for each sample: the same seed gives the same draw on
    any device. `on_step(t, tokens)` sees the text as it appears. `kept` [N]: text to write on; its tokens stay as they
    are in every step, but where they are [MASK], of which each sample has one at least.
    """
    assert mode != "joint" or config.guidance == 1, "guidance needs a condition"
    device, batch = latents.device, latents.shape[0]
    layout = PackedLayout(lengths, latents.shape[1], device)
    decoding = config.decoding_of(mode)
    noise = draw_normal(generator, latents.shape).to(device)
    writes_text, writes_latent = mode != "t2l", mode != "l2t"
    z = latent.prior(noise) if writes_latent else latents
    if writes_text:
        x = (torch.full((layout.num_tokens,), text.mask_id) if kept is None else kept).to(device)
        blank = Blank.of(x, text.mask_id, layout)
    else:
        assert tokens is not None
        x = tokens.to(device)
    all_masked = torch.full_like(x, text.mask_id)

    def times(value: float) -> Tensor:
        return torch.full((batch,), value, device=device)

    grid = torch.linspace(1, 0, config.steps + 1).tolist()
    for t, s in pairwise(grid):
        positions = x.new_empty(0)
        if writes_text:
            part = blank.places
            chosen = text.choose(x[part], t, s, blank.layout, decoding, config.remask, generator)
            positions = part[chosen[0]]
        t_text, t_latent = t * blank.share if writes_text else times(0.0), times(t if writes_latent else 0.0)
        proposal, confidence = x, torch.zeros(x.shape, device=device)
        if writes_latent or len(positions):  # else nobody reads what the network says
            logits, latent_pred, *_ = model(x, z, t_text, t_latent, layout, positions, None)
            if config.guidance != 1:
                if mode == "l2t":
                    free, *_ = model(x, noise, t_text, times(1.0), layout, positions, None)
                    logits = free + config.guidance * (logits - free)
                else:
                    _, free, *_ = model(all_masked, z, times(1.0), t_latent, layout, positions, None)
                    latent_pred = latent.guide(latent_pred, free, times(t), config.guidance)
            if writes_latent:
                z = latent.reverse_step(latent_pred, z, times(t), times(s), config.latent_sampler)
            if writes_text:
                log_p = sharpen(logits, config.temperature, config.top_p)
                drawn = draw_tokens(log_p, config.temperature, generator, layout.sample_of_token[positions])
                proposal = proposal.index_copy(0, positions, drawn)
                confidence = confidence.index_copy(0, positions, log_p.gather(1, drawn[:, None]).squeeze(1))
        if writes_text:
            stepped = text.reverse_step(x[part], proposal[part], confidence[part], chosen, s, blank.layout, decoding)
            x = x.index_copy(0, part, stepped)
            if on_step is not None:
                on_step(s, x)
    return Generation(x.cpu(), lengths, z.float().cpu())


@torch.no_grad()
def draw_lengths(
    model: Network, mask_id: int, latents: Tensor, t_latent: float, generator: torch.Generator
) -> tuple[int, ...]:
    """Return a length for each sample by the length head, given its latents [B, M, C] at noise time `t_latent`.

    A latent without noise (t_latent = 0) gives the median of the head's distribution, which has the least expected
    error; noise gives a draw from it, as lengths vary where there is no condition.
    """
    batch, device = latents.shape[0], latents.device
    layout = PackedLayout((1,) * batch, latents.shape[1], device)
    tokens = torch.full((batch,), mask_id, device=device)  # the head sees no text: one masked token stands in for it
    ones = torch.ones(batch, device=device)
    _, _, logits, *_ = model(tokens, latents, ones, ones * t_latent, layout, tokens.new_empty(0), None)
    p = logits.float().softmax(-1).cpu()
    if t_latent == 0:
        index = (p.cumsum(-1) < 0.5).sum(-1).clamp_max(p.shape[-1] - 1)
    else:
        index = torch.multinomial(p, 1, generator=generator).squeeze(1)
    return tuple((index + 1).tolist())
