"""MMDiT as the papers draw it: padded rectangles, one dense joint attention with a key-padding mask.

Written apart from `mmldlm.model`, of which only the weights and the time embedding are used.
Shapes: text [B, L, D], latents [B, M, E], conditioning [B, T].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.model.layers import FeedForward, Modulation
from mmldlm.model.mmdit import BlockStream, MMDiT


def normalize(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale


def adaptations(part: Modulation, conditioning: Tensor) -> list[Tensor]:
    """shift, scale and gate of each branch, each [B, 1, D]."""
    hidden = F.silu(conditioning)
    if part.down is not None:
        hidden = hidden @ part.down.weight.T
    table = hidden @ part.up.weight.T + part.up.bias
    return [column[:, None] for column in table.chunk(3 * part.branches, -1)]


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions as multiplication by exp(i m theta); x [B, L, H, K]."""
    length, half = x.shape[1], x.shape[-1] // 2
    theta = base ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones(length, half), torch.arange(length)[:, None] * theta)
    z = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn[:, None]
    return torch.cat([z.real, z.imag], -1)


def feed_forward(part: FeedForward, x: Tensor) -> Tensor:
    hidden = x @ part.up.weight.T
    if part.down.kind == "gelu":
        inner = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    else:
        gate, value = hidden.chunk(2, -1)
        inner = gate * gate.sigmoid() * value
    return inner @ part.down.weight.T


def project(stream: BlockStream, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = ((normalize(x) * (1 + scale) + shift) @ stream.qkv.weight.T).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (stream.heads, -1)) for part in (q, k, v))
    return rms(q, stream.head_norm.q), rms(k, stream.head_norm.k), v


def padded_block(
    block: nn.Module, text: Tensor, latent: Tensor, conditioning: Tensor, real: Tensor, base: float
) -> tuple[Tensor, Tensor]:
    streams, states, m = (block.latent, block.text), (latent, text), latent.shape[1]
    adapted = [adaptations(stream.modulation, conditioning) for stream in streams]
    (lq, lk, lv), (tq, tk, tv) = (
        project(stream, x, a[0], a[1]) for stream, x, a in zip(streams, states, adapted, strict=True)
    )
    q, k, v = torch.cat([lq, turned(tq, base)], 1), torch.cat([lk, turned(tk, base)], 1), torch.cat([lv, tv], 1)
    scores = torch.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1])
    keys = torch.cat([torch.ones(len(real), m, dtype=torch.bool), real], 1)
    attention = scores.masked_fill(~keys[:, None, None], float("-inf")).softmax(-1)
    joint = torch.einsum("bhqs,bshk->bqhk", attention, v).flatten(2)
    results = []
    for stream, x, a, out in zip(streams, states, adapted, (joint[:, :m], joint[:, m:]), strict=True):
        x = x + a[2] * stream.out(out)
        results.append(x + a[5] * feed_forward(stream.mlp, normalize(x) * (1 + a[4]) + a[3]))
    return results[1], results[0]


def padded_forward(
    model: MMDiT, tokens: Tensor, latents: Tensor, t_text: Tensor, t_latent: Tensor, real: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, L, V], latent predictions [B, M, C] and length logits, for padded tokens [B, L]."""
    latent_time = model.latent_time(t_latent)
    conditioning = model.text_time(t_text) + latent_time
    text = model.token_embedding.weight[tokens]
    latent = model.latent_in(latents) + model.latent_position
    head = model.length_head
    lengths = head.out(F.silu(head.hidden(latent)).mean(1) * (1 + head.time(latent_time)))
    for block in model.blocks:
        text, latent = padded_block(block, text, latent, conditioning, real, model.config.rope_base)
    shift, scale, gate = adaptations(model.text_final, conditioning)
    out = model.text_out
    hidden = ((normalize(text) * (1 + scale) + shift) @ out.weight.T + out.bias) * (1 + gate)
    weight = model.token_embedding.weight if model.text_head.weight is None else model.text_head.weight
    logits = hidden @ weight.T
    logits[..., [model.shape.mask_id, model.shape.pad_id]] = float("-inf")
    shift, scale, gate = adaptations(model.latent_final, conditioning)
    predicted = model.latent_head((normalize(latent) * (1 + scale) + shift) * (1 + gate))
    if model.latent_skip is not None:
        predicted = predicted + model.latent_skip(conditioning)[:, None] * latents
    return logits, predicted, lengths
