"""Triton kernels of what a GPU would otherwise spend most passes over memory on; imported on GPUs alone.

Shape letters: B samples, T rows of a stream, D width, H heads, K width of a head.
"""

# mypy: disable-error-code="no-untyped-def"
# (a kernel has no types: those of its arguments are known when it is compiled)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

PAIRS = 64  # (row, head) pairs of a program
TILE_ROWS, TILE_COLUMNS = 16, 64  # of a sum over rows


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _heads_kernel(
    qkv, weight, cos, sin, out, num_pairs, epsilon, heads: tl.constexpr, width: tl.constexpr, half_block: tl.constexpr,
    pairs_block: tl.constexpr, rotary: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)  # 0: queries, 1: keys, 2: values
    pairs = (tl.program_id(0) * pairs_block + tl.arange(0, pairs_block)).to(tl.int64)
    channels = tl.arange(0, half_block)
    half: tl.constexpr = width // 2
    is_channel = channels < half
    mask = (pairs < num_pairs)[:, None] & is_channel[None]
    rows = pairs // heads
    first_at = ((3 * rows + part) * heads + pairs % heads)[:, None] * width + channels[None]
    first, second = tl.load(qkv + first_at, mask, 0.0), tl.load(qkv + first_at + half, mask, 0.0)
    if part < 2:
        x, y = first.to(tl.float32), second.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        weight_at = weight + part * width + channels
        x *= rstd * tl.load(weight_at, is_channel, 0.0)[None]
        y *= rstd * tl.load(weight_at + half, is_channel, 0.0)[None]
        if rotary:
            angle_at = rows[:, None] * half + channels[None]
            x, y = _rotate(x, y, tl.load(cos + angle_at, mask, 0.0), tl.load(sin + angle_at, mask, 0.0))
        first, second = x.to(first.dtype), y.to(first.dtype)
    tl.store(out + first_at, first, mask)
    tl.store(out + first_at + half, second, mask)


@triton.jit
def _heads_backward_kernel(
    grad, qkv, weight, cos, sin, qkv_grad, weight_grads, num_pairs, epsilon, heads: tl.constexpr, width: tl.constexpr,
    half_block: tl.constexpr, pairs_block: tl.constexpr, rotary: tl.constexpr,
):  # fmt: skip
    part, program = tl.program_id(1), tl.program_id(0)
    pairs = (program * pairs_block + tl.arange(0, pairs_block)).to(tl.int64)
    channels = tl.arange(0, half_block)
    half: tl.constexpr = width // 2
    is_channel = channels < half
    mask = (pairs < num_pairs)[:, None] & is_channel[None]
    rows = pairs // heads
    first_at = ((3 * rows + part) * heads + pairs % heads)[:, None] * width + channels[None]
    first, second = tl.load(grad + first_at, mask, 0.0), tl.load(grad + first_at + half, mask, 0.0)
    if part < 2:
        dx, dy = first.to(tl.float32), second.to(tl.float32)
        if rotary:
            angle_at = rows[:, None] * half + channels[None]
            # The adjoint of a rotation turns back.
            dx, dy = _rotate(dx, dy, tl.load(cos + angle_at, mask, 0.0), -tl.load(sin + angle_at, mask, 0.0))
        x = tl.load(qkv + first_at, mask, 0.0).to(tl.float32)
        y = tl.load(qkv + first_at + half, mask, 0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        x, y = x * rstd, y * rstd
        sums_at = weight_grads + (part * tl.num_programs(0) + program) * width + channels
        tl.store(sums_at, tl.sum(dx * x, 0), is_channel)
        tl.store(sums_at + half, tl.sum(dy * y, 0), is_channel)
        weight_at = weight + part * width + channels
        dx *= tl.load(weight_at, is_channel, 0.0)[None]
        dy *= tl.load(weight_at + half, is_channel, 0.0)[None]
        # RMS norm's gradient: without the component along the normalized vector, times rstd.
        projection = (tl.sum(dx * x + dy * y, 1) / width)[:, None]
        first, second = ((dx - x * projection) * rstd).to(first.dtype), ((dy - y * projection) * rstd).to(first.dtype)
    tl.store(qkv_grad + first_at, first, mask)
    tl.store(qkv_grad + first_at + half, second, mask)


@triton.jit
def _sums_kernel(values, offsets, out, width, tile_rows: tl.constexpr, tile_columns: tl.constexpr):
    sample, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    start, stop, is_column = tl.load(offsets + sample), tl.load(offsets + sample + 1), columns < width
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for first in range(start, stop, tile_rows):
        rows = first + tl.arange(0, tile_rows).to(tl.int64)
        at = rows[:, None] * width + columns[None]
        total += tl.load(values + at, (rows < stop)[:, None] & is_column[None], 0.0).to(tl.float32)
    tl.store(out + sample * width + columns, tl.sum(total, 0), is_column)


def _shape(qkv_T3HK: Tensor, cos: Tensor | None) -> tuple[int, dict[str, int | bool]]:
    heads, width = qkv_T3HK.shape[2:]
    block = triton.next_power_of_2(width // 2)
    shape = {"heads": heads, "width": width, "half_block": block, "pairs_block": max(1, 32 * PAIRS // block)}
    return qkv_T3HK.shape[0] * heads, {**shape, "rotary": cos is not None}


@triton_op("mmldlm::normalize_heads", mutates_args=())
def _normalize_heads(
    qkv_T3HK: Tensor, weight_2K: Tensor, cos: Tensor | None, sin: Tensor | None, epsilon: float
) -> Tensor:
    out = torch.empty_like(qkv_T3HK)
    num_pairs, shape = _shape(qkv_T3HK, cos)
    grid = (triton.cdiv(num_pairs, shape["pairs_block"]), 3)
    wrap_triton(_heads_kernel)[grid](qkv_T3HK, weight_2K, cos, sin, out, num_pairs, epsilon, **shape)
    return out


@triton_op("mmldlm::normalize_heads_backward", mutates_args=())
def _normalize_heads_backward(
    grad_T3HK: Tensor, qkv_T3HK: Tensor, weight_2K: Tensor, cos: Tensor | None, sin: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    qkv_grad = torch.empty_like(qkv_T3HK)
    num_pairs, shape = _shape(qkv_T3HK, cos)
    grid = (triton.cdiv(num_pairs, shape["pairs_block"]), 3)
    sums = weight_2K.new_empty(2, grid[0], shape["width"])
    wrap_triton(_heads_backward_kernel)[grid](
        grad_T3HK, qkv_T3HK, weight_2K, cos, sin, qkv_grad, sums, num_pairs, epsilon, **shape
    )
    return qkv_grad, sums.sum(1)


class NormalizeHeads(Function):
    """`ops.normalize_heads` in one pass over memory forward, and one backward; sums are in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, qkv_T3HK: Tensor, weight_2K: Tensor, cos: Tensor | None, sin: Tensor | None, epsilon: float
    ) -> Tensor:
        qkv_T3HK, ctx.epsilon = qkv_T3HK.contiguous(), epsilon
        ctx.save_for_backward(qkv_T3HK, weight_2K, cos, sin)
        return _normalize_heads(qkv_T3HK, weight_2K, cos, sin, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T3HK: Tensor) -> tuple[Tensor | None, ...]:
        return *_normalize_heads_backward(grad_T3HK.contiguous(), *ctx.saved_tensors, ctx.epsilon), None, None, None


@triton_op("mmldlm::sample_sums", mutates_args=())
def sample_sums(values_TD: Tensor, offsets: Tensor) -> Tensor:
    """Return the sums [B, D] in float32 of the rows offsets[b] to offsets[b + 1], in a fixed order."""
    samples, width = offsets.shape[0] - 1, values_TD.shape[1]
    out = values_TD.new_empty(samples, width, dtype=torch.float32)
    grid = (samples, triton.cdiv(width, TILE_COLUMNS))
    wrap_triton(_sums_kernel)[grid](values_TD, offsets, out, width, TILE_ROWS, TILE_COLUMNS)
    return out
