"""Joint attention of both streams over unpadded samples: no attention across samples, no computation on padding.

All backends compute the same function:

- `sdpa`: neighboring samples of equal length form a group (batches are sorted by length), with one call of
  `scaled_dot_product_attention` per group. It works on every device, and is the fastest backend on a CPU, which has no
  varlen kernel and no backward of FlexAttention.
- `varlen`: one call of `torch.nn.attention.varlen` (FlashAttention) for the whole micro-batch. It needs half precision
  and an Ampere or newer GPU.
- `efficient`: one call of PyTorch's memory-efficient attention (CUTLASS) for the whole micro-batch, for older GPUs and
  for fp32.
- `math`: one masked softmax over all rows, quadratic in S. It is the reference for tests.

`sdpa` reads the lengths of the samples on the host. The other backends read tensors alone (`JointRows`), so that
`torch.compile` can compile their calls together with the operations around them.

Shape letters: B samples, N text tokens, M latent tokens of a sample, H heads, K width of a head,
S = B*M + N rows of the joint sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.errors import ConfigError
from mmldlm.settings.declaration import setting

Backend = Literal["sdpa", "varlen", "efficient", "math"]
AMPERE = (8, 0)  # compute capability
_HEAD_WIDTH = "a head width (model.width / model.num_heads)"


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of the joint attention."""

    backend: Literal["auto", "sdpa", "varlen", "efficient", "math"] = setting(
        "auto",
        "kernel of the joint attention. varlen: FlashAttention for CUDA in bf16 or fp16, on Ampere or newer; it "
        "is FlashAttention 4 if flash-attn-4 is installed and the compute capability is 9 or 10. efficient: "
        "other CUDA GPUs and fp32. sdpa: any device, by groups of samples of equal length. auto: the first of "
        "them that supports the device, the precision and the head width (model.width / model.num_heads). "
        "`mmldlm train --check` and the dry run print the choice",
    )


def resolve_backend(
    requested: Backend | Literal["auto"],
    device_type: str,
    precision: str,
    head_width: int,
    capability: tuple[int, int] | None,
) -> Backend:
    """Return the backend to use, or raise `ConfigError` if the requested one does not run there.

    `capability` is the compute capability of the GPU. None, if it is unknown, counts as Ampere.
    """
    where = (device_type, precision, head_width, capability or AMPERE)
    missing: dict[Backend, str] = {"varlen": _missing("varlen", *where), "efficient": _missing("efficient", *where)}
    auto: Backend = next((backend for backend, what in missing.items() if not what), "sdpa")
    if requested == "auto":
        return auto
    if missing.get(requested):
        raise ConfigError(f"attention.backend: {requested} needs {missing[requested]}; set auto, which chooses {auto}")
    return requested


def _missing(backend: Backend, device_type: str, precision: str, head_width: int, capability: tuple[int, int]) -> str:
    """Return which requirement of varlen or efficient is not met, and the value found, or "" if the backend runs."""
    # PyTorch's `sdp_utils.cpp` has these conditions for `scaled_dot_product_attention`, but does not check them for
    # calls with offsets: the kernels would raise in the first step.
    version = ".".join(map(str, capability))
    if device_type != "cuda":
        return f"CUDA, found {device_type}"
    if backend == "efficient":
        if precision == "bf16" and capability < AMPERE:
            return f"a GPU of compute capability 8.0 or newer in bf16, found {version}"
        multiple = 4 if precision == "fp32" else 8  # 16 bytes
        return f"{_HEAD_WIDTH} that is a multiple of {multiple}, found {head_width}" if head_width % multiple else ""
    if precision == "fp32":
        return "precision bf16 or fp16, found fp32"
    if capability < AMPERE:
        return f"a GPU of compute capability 8.0 or newer, found {version}"
    if head_width % 8 or head_width > 256:
        return f"{_HEAD_WIDTH} of 8, 16, ... 256, found {head_width}"
    # The backward of varlen does not fit into the shared memory of these GPUs.
    if 192 < head_width <= 224 and ((8, 6) <= capability <= (8, 9) or capability >= (12, 0)):
        gpu = f"a GPU of compute capability {version}"
        return f"{_HEAD_WIDTH} of at most 192 or above 224 on {gpu}, found {head_width}"
    return ""


class JointRows(NamedTuple):
    """Rows of the joint sequence. The latents of each sample come before its tokens."""

    order: Tensor  # int64 [S], indices into cat(latents, tokens)
    inverse: Tensor  # int64 [S], the inverse permutation
    offsets: Tensor  # int32 [B + 1], cumulative lengths of the samples
    max_length: int  # no sample is longer. All micro-batches have the same value, for which kernels are compiled


def rows_to_attend(backend: Backend, layout: PackedLayout, max_length: int) -> PackedLayout | JointRows:
    """Return the rows for `joint_attention` with this backend. No sample has more than `max_length` tokens."""
    if backend not in JOINT_BACKENDS:
        return layout
    longest = max(max_length, layout.max_length) + layout.latent_tokens
    return JointRows(layout.joint_order, layout.joint_inverse, layout.joint_offsets, longest)


def joint_attention(
    latent_qkv: Tensor, text_qkv: Tensor, rows: PackedLayout | JointRows, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Attend from each row to the latents and tokens of its own sample.

    Args:
        latent_qkv: q, k and v of the latent stream [B*M, 3, H, K].
        text_qkv: q, k and v of the text stream [N, 3, H, K].
        rows: The result of `rows_to_attend`.

    Returns:
        The outputs of latents [B*M, H, K] and text [N, H, K].
    """
    if isinstance(rows, PackedLayout):
        return _grouped_sdpa(latent_qkv, text_qkv, rows)
    q, k, v = _Reorder.apply(torch.cat([latent_qkv, text_qkv]), rows.order, rows.inverse).unbind(1)
    return attend_jointly(q, k, v, rows, backend, len(latent_qkv))


def attend_jointly(
    q: Tensor, k: Tensor, v: Tensor, rows: JointRows, backend: Backend, num_latents: int
) -> tuple[Tensor, Tensor]:
    """As `joint_attention`, but q, k and v are [S, H, K] with each sample's latents before its tokens."""
    streams: Tensor = _Reorder.apply(JOINT_BACKENDS[backend](q, k, v, rows), rows.inverse, rows.order)
    latents, text = streams.split([num_latents, len(streams) - num_latents])  # see `_grouped_sdpa`
    return latents, text


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
        # [samples, M + length, 3, H, K]: all samples of the group have one length, so no mask is needed.
        q, k, v = torch.cat(rows, dim=1).permute(2, 0, 3, 1, 4).unbind()  # each [samples, H, M + length, K]
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        latent_part, text_part = out.split([m, group.length], dim=1)
        latent_out.append(latent_part.reshape(-1, heads, head_width))
        text_out.append(text_part.reshape(-1, heads, head_width))
    return torch.cat(latent_out), torch.cat(text_out)


def _varlen(q: Tensor, k: Tensor, v: Tensor, rows: JointRows) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # absent from CPU-only builds of older releases

    out = varlen_attn(q, k, v, rows.offsets, rows.offsets, rows.max_length, rows.max_length)
    assert isinstance(out, Tensor)
    return out


def _efficient(q: Tensor, k: Tensor, v: Tensor, rows: JointRows) -> Tensor:
    out, *_ = torch.ops.aten._efficient_attention_forward(
        q[None],
        k[None],
        v[None],
        bias=None,
        cu_seqlens_q=rows.offsets,
        cu_seqlens_k=rows.offsets,
        max_seqlen_q=rows.max_length,
        max_seqlen_k=rows.max_length,
        dropout_p=0.0,
        custom_mask_type=0,  # no mask
        compute_log_sumexp=torch.is_grad_enabled(),  # for backward
    )
    return out[0]


def _math(q: Tensor, k: Tensor, v: Tensor, rows: JointRows) -> Tensor:
    # The number of samples before each row's end.
    sample = torch.bucketize(torch.arange(len(q), device=q.device, dtype=torch.int32), rows.offsets, right=True)
    # [H, S, S], in float32 under half precision as well.
    scores = torch.einsum("qhk,shk->hqs", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(sample[:, None] != sample[None, :], float("-inf"))
    return torch.einsum("hqs,shk->qhk", scores.softmax(-1), v.float()).to(q.dtype)


class _Reorder(torch.autograd.Function):
    """Permutation of rows. Its gradient is the inverse permutation: without atomic adds, so deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


JOINT_BACKENDS: dict[Backend, Callable[[Tensor, Tensor, Tensor, JointRows], Tensor]] = {
    "varlen": _varlen,
    "efficient": _efficient,
    "math": _math,
}
