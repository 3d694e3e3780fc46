"""Joint attention of both streams over unpadded samples: no token sees another sample, no padding is computed.

Each backend computes the same numbers:

- `sdpa`: samples of equal length form groups (neighbors in a length-sorted batch); one
  scaled-dot-product attention a group. The fastest on a CPU, where varlen and FlexAttention's backward
  are missing, and right on every device.
- `varlen`: one call of `torch.nn.attention.varlen` for the whole micro-batch; CUDA in half precision.
- `math`: one masked softmax over everything. The reference for tests; quadratic in N.

Shape letters: B samples, N text tokens, M latent tokens of a sample, H heads, K width of a head,
S = B*M + N rows of the joint sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmldlm.batch import LengthGroup, PackedLayout
from mmldlm.errors import ConfigError
from mmldlm.settings.fields import setting

Backend = Literal["sdpa", "varlen", "math"]


@dataclass(frozen=True)
class AttentionConfig:
    backend: Literal["auto", "sdpa", "varlen", "math"] = setting(
        "auto",
        "kernel of the joint attention; auto: varlen on CUDA in bf16 or fp16, otherwise sdpa by groups of equal length",
    )


def resolve_backend(asked: str, device_type: str, half_precision: bool) -> Backend:
    """The backend to use; `ConfigError` where the one asked for cannot run."""
    varlen_runs = device_type == "cuda" and half_precision
    if asked == "auto":
        return "varlen" if varlen_runs else "sdpa"
    if asked == "varlen" and not varlen_runs:
        raise ConfigError(
            f"attention.backend: varlen needs CUDA and precision bf16 or fp16, found {device_type}"
            f"{'' if half_precision else ' in fp32'}; use auto"
        )
    return asked  # type: ignore[return-value]


def joint_attention(
    latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Attention of each sample over its own latents and tokens.

    Takes q, k and v as [B*M, 3, H, K] of the latent stream and [R, 3, H, K] of the text stream; gives
    [B*M, H, K] and [R, H, K], which is zero in rows of none. It is computed in the type of `text_qkv`.
    """
    latent, text = _attention(latent_qkv.to(text_qkv.dtype), text_qkv, layout, backend)
    return latent.to(latent_qkv.dtype), text


def _attention(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout, backend: Backend) -> tuple[Tensor, Tensor]:
    if backend == "sdpa" and text_qkv.device.type == "cpu" and text_qkv.dtype in (torch.bfloat16, torch.float16):
        latent, text = _HalfOnCPU.apply(latent_qkv, text_qkv, layout)
        return latent, text
    assert not layout.num_padding_rows, "only half precision on a CPU gains by them"
    if backend == "sdpa":
        return _by_groups(latent_qkv, text_qkv, layout)
    attend = _varlen if backend == "varlen" else _math
    order, inverse = layout.joint_order, layout.joint_inverse
    q, k, v = _Reorder.apply(torch.cat([latent_qkv, text_qkv]), order, inverse).unbind(1)
    out = _Reorder.apply(attend(q, k, v, layout), inverse, order)
    latents = layout.num_samples * layout.latent_tokens
    return out.split([latents, layout.num_tokens])


class _Reorder(torch.autograd.Function):
    """Rows in another order. The gradient of a permutation is its inverse: no atomic adds, so the same bits."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, inverse), None, None


def _by_groups(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    m, (heads, head_width) = layout.latent_tokens, text_qkv.shape[-2:]
    counts = [group.last - group.first for group in layout.groups]
    # Split, not sliced: the gradient of a slice is as large as the whole.
    latents = latent_qkv.split([count * m for count in counts])
    texts = text_qkv.split([group.stop - group.start for group in layout.groups])
    latent_out, text_out = [], []
    for group, count, latent, text in zip(layout.groups, counts, latents, texts, strict=True):
        rows = [latent.unflatten(0, (count, m)), text.unflatten(0, (count, group.length))]
        q, k, v = _heads_first(torch.cat(rows, dim=1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        latent_part, text_part = out.split([m, group.length], dim=1)
        latent_out.append(latent_part.reshape(-1, heads, head_width))
        text_out.append(text_part.reshape(-1, heads, head_width))
    return torch.cat(latent_out), torch.cat(text_out)


class _HalfOnCPU(torch.autograd.Function):
    """`_by_groups` with PyTorch's kernel for CPUs, its backward in float32, where it takes 0.3 to 0.7 of the time."""

    @staticmethod
    def forward(ctx: Any, latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        latent_out, text_out = torch.empty_like(latent_qkv[:, 0]), torch.empty_like(text_qkv[:, 0])
        text_out[layout.num_tokens :] = 0
        saved: list[Tensor] = []
        for group in layout.groups:
            qkv = torch.cat(_samples(group, layout, latent_qkv, text_qkv), dim=1)
            out, log_z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(qkv))
            for rows, part in zip(_samples(group, layout, latent_out, text_out), _parts(out, layout), strict=True):
                rows.copy_(part)
            saved += [qkv, out, log_z]
        ctx.layout, ctx.shapes = layout, (latent_qkv.shape, text_qkv.shape)
        ctx.save_for_backward(*saved)
        return latent_out, text_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, latent_grad: Tensor, text_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        layout, saved = ctx.layout, ctx.saved_tensors
        latent_qkv, text_qkv = (text_grad.new_empty(shape) for shape in ctx.shapes)
        text_qkv[layout.num_tokens :] = 0
        for group, qkv, out, log_z in zip(layout.groups, saved[::3], saved[1::3], saved[2::3], strict=True):
            grad = torch.cat(_samples(group, layout, latent_grad, text_grad), dim=1).float().transpose(1, 2)
            inputs = grad, *_heads_first(qkv.float()), out.float(), log_z
            of_qkv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, False)
            for which, each in enumerate(of_qkv):
                for rows, part in zip(_samples(group, layout, latent_qkv, text_qkv), _parts(each, layout), strict=True):
                    rows[:, :, which] = part
        return latent_qkv, text_qkv, None


def _samples(group: LengthGroup, layout: PackedLayout, latents: Tensor, texts: Tensor) -> list[Tensor]:
    """The group's [samples, M, ...] and [samples, length, ...] in the rows of both streams."""
    count, m = group.last - group.first, layout.latent_tokens
    latents, texts = latents[group.first * m : group.last * m], texts[group.start : group.stop]
    return [latents.unflatten(0, (count, m)), texts.unflatten(0, (count, group.length))]


def _heads_first(qkv: Tensor) -> tuple[Tensor, ...]:
    """q, k and v [samples, H, S, K] of [samples, S, 3, H, K]."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def _parts(heads_first: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """What belongs to latents [samples, M, H, K] and text [samples, length, H, K] in [samples, H, S, K]."""
    rows = heads_first.transpose(1, 2)
    return rows[:, : layout.latent_tokens], rows[:, layout.latent_tokens :]


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent from CPU-only builds of older releases

    offsets, longest = layout.joint_offsets, layout.max_length + layout.latent_tokens
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest)
    assert isinstance(out, Tensor)
    return out


def _math(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    lengths = layout.joint_offsets.diff().long()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    scores = torch.einsum("qhk,shk->hqs", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(sample[:, None] != sample[None, :], float("-inf"))
    return torch.einsum("hqs,shk->qhk", scores.softmax(-1), v.float()).to(q.dtype)
