"""Joint attention of both streams over unpadded samples: no attention across samples, no computation on padding.

All backends compute the same function:

- `sdpa`: neighboring samples of equal length form a group (batches are sorted by length), with one call of
  `scaled_dot_product_attention` per group. Works on every device, and is the fastest on a CPU, which has no varlen
  kernel and no backward of FlexAttention.
- `varlen`: one call of `torch.nn.attention.varlen` for the whole micro-batch; CUDA in half precision.
- `math`: one masked softmax over all rows. The reference for tests; quadratic in S.

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
    """Settings of the joint attention."""

    backend: Literal["auto", "sdpa", "varlen", "math"] = setting(
        "auto",
        "kernel of the joint attention; auto: varlen on CUDA in bf16 or fp16, otherwise sdpa by groups of equal length",
    )


def resolve_backend(requested: str, device_type: str, half_precision: bool) -> Backend:
    """Return the backend to use.

    Raises:
        ConfigError: the requested backend does not run on the device in this precision.
    """
    varlen_available = device_type == "cuda" and half_precision
    if requested == "auto":
        return "varlen" if varlen_available else "sdpa"
    if requested == "varlen" and not varlen_available:
        raise ConfigError(
            f"attention.backend: varlen needs CUDA and precision bf16 or fp16, found {device_type}"
            f"{'' if half_precision else ' in fp32'}; use auto"
        )
    return requested  # type: ignore[return-value]


def joint_attention(
    latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Attend from each row to the latents and tokens of its own sample, in the type of `text_qkv`.

    Args:
        latent_qkv: q, k and v of the latent stream [B*M, 3, H, K].
        text_qkv: q, k and v of the text stream [R, 3, H, K]; R is N plus the padding rows of `layout`.
        layout: which rows belong to which sample.
        backend: see the module's docstring.

    Returns:
        The outputs of latents [B*M, H, K] and text [R, H, K], which is zero in padding rows.
    """
    latent, text = _attention(latent_qkv.to(text_qkv.dtype), text_qkv, layout, backend)
    return latent.to(latent_qkv.dtype), text


def _attention(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout, backend: Backend) -> tuple[Tensor, Tensor]:
    if backend == "sdpa" and text_qkv.device.type == "cpu" and text_qkv.dtype in (torch.bfloat16, torch.float16):
        latent, text = _CPUHalfAttention.apply(latent_qkv, text_qkv, layout)
        return latent, text
    assert not layout.num_padding_rows, "padding rows are for half precision on a CPU"
    if backend == "sdpa":
        return _grouped_sdpa(latent_qkv, text_qkv, layout)
    attend = _varlen if backend == "varlen" else _math
    order, inverse = layout.joint_order, layout.joint_inverse
    q, k, v = _Reorder.apply(torch.cat([latent_qkv, text_qkv]), order, inverse).unbind(1)
    out = _Reorder.apply(attend(q, k, v, layout), inverse, order)
    latents = layout.num_samples * layout.latent_tokens
    return out.split([latents, layout.num_tokens])


class _Reorder(torch.autograd.Function):
    """Permutation of rows. Its gradient is the inverse permutation: without atomic adds, so deterministic."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad.index_select(0, inverse), None, None


def _grouped_sdpa(latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Call SDPA once for each group of equal lengths, with each sample's latents before its tokens."""
    m, (heads, head_width) = layout.latent_tokens, text_qkv.shape[-2:]
    counts = [group.last - group.first for group in layout.groups]
    # split, not slices: the gradient of a slice is as large as the whole tensor.
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


class _CPUHalfAttention(torch.autograd.Function):
    """`_grouped_sdpa` with PyTorch's CPU kernel. Its backward runs in float32, which takes 0.3 to 0.7 of the time."""

    @staticmethod
    def forward(ctx: Any, latent_qkv: Tensor, text_qkv: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        latent_out, text_out = torch.empty_like(latent_qkv[:, 0]), torch.empty_like(text_qkv[:, 0])
        text_out[layout.num_tokens :] = 0
        saved: list[Tensor] = []
        for group in layout.groups:
            qkv = torch.cat(_samples(group, layout, latent_qkv, text_qkv), dim=1)
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(qkv))
            for rows, part in zip(_samples(group, layout, latent_out, text_out), _parts(out, layout), strict=True):
                rows.copy_(part)
            saved += [qkv, out, logsumexp]
        ctx.layout, ctx.shapes = layout, (latent_qkv.shape, text_qkv.shape)
        ctx.save_for_backward(*saved)
        return latent_out, text_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, latent_grad: Tensor, text_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        layout, saved = ctx.layout, ctx.saved_tensors
        latent_qkv_grad, text_qkv_grad = (text_grad.new_empty(shape) for shape in ctx.shapes)
        text_qkv_grad[layout.num_tokens :] = 0
        for group, qkv, out, logsumexp in zip(layout.groups, saved[::3], saved[1::3], saved[2::3], strict=True):
            grad = torch.cat(_samples(group, layout, latent_grad, text_grad), dim=1).float().transpose(1, 2)
            inputs = grad, *_heads_first(qkv.float()), out.float(), logsumexp
            q_k_v_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, False)
            streams = _samples(group, layout, latent_qkv_grad, text_qkv_grad)
            for index, joint_grad in enumerate(q_k_v_grads):
                for rows, part in zip(streams, _parts(joint_grad, layout), strict=True):
                    rows[:, :, index] = part
        return latent_qkv_grad, text_qkv_grad, None


def _samples(group: LengthGroup, layout: PackedLayout, latents: Tensor, texts: Tensor) -> list[Tensor]:
    """Return views of the group's rows in both streams: [samples, M, ...] and [samples, length, ...]."""
    count, m = group.last - group.first, layout.latent_tokens
    latents, texts = latents[group.first * m : group.last * m], texts[group.start : group.stop]
    return [latents.unflatten(0, (count, m)), texts.unflatten(0, (count, group.length))]


def _heads_first(qkv: Tensor) -> tuple[Tensor, ...]:
    """Return q, k and v, each [samples, H, S, K], from [samples, S, 3, H, K]."""
    return qkv.permute(2, 0, 3, 1, 4).unbind()


def _parts(heads_first: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Split [samples, H, S, K] into latents [samples, M, H, K] and text [samples, length, H, K]."""
    rows = heads_first.transpose(1, 2)
    return rows[:, : layout.latent_tokens], rows[:, layout.latent_tokens :]


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent from CPU-only builds of older releases

    offsets, max_length = layout.joint_offsets, layout.max_length + layout.latent_tokens
    out = varlen_attn(q, k, v, offsets, offsets, max_length, max_length)
    assert isinstance(out, Tensor)
    return out


def _math(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    lengths = layout.joint_offsets.diff().long()
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    scores = torch.einsum("qhk,shk->hqs", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(sample[:, None] != sample[None, :], float("-inf"))
    return torch.einsum("hqs,shk->qhk", scores.softmax(-1), v.float()).to(q.dtype)
