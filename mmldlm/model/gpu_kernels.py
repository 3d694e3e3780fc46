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

from mmldlm.model.ops import TILE_ROWS

PAIRS = 64  # (row, head) pairs of a program
NORM_NUMEL = 4096  # elements of a norm's rows, at a time


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
def _row_norm(values, is_column, epsilon, width: tl.constexpr):
    centered = tl.where(is_column, values - (tl.sum(values, 1) / width)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 1) / width + epsilon)[:, None]
    return centered * rstd, rstd


@triton.jit
def _norm_tile(offsets, tiles, tile_rows: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    first, stop = sample, sample + 1  # without tiles row i belongs to sample i
    if tiles is not None:
        sample = tl.load(tiles + first)
        start = tl.load(offsets + sample)
        first = start + (first - start // tile_rows - sample) * tile_rows
        stop = tl.minimum(first + tile_rows, tl.load(offsets + sample + 1))
    return sample, first, stop


@triton.jit
def _add_norm_kernel(
    x, branch, gate, shift_scale, offsets, tiles, y, out, gate_stride, mod_stride, epsilon, width: tl.constexpr,
    block: tl.constexpr, rows_block: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    sample, first, stop = _norm_tile(offsets, tiles, tile_rows)
    columns = tl.arange(0, block)[None]
    is_column = columns < width
    gates = tl.load(gate + sample * gate_stride + columns, is_column, 0.0).to(tl.float32)
    shift_at = shift_scale + sample * mod_stride + columns
    shift = tl.load(shift_at, is_column, 0.0).to(tl.float32)
    scale = tl.load(shift_at + width, is_column, 0.0).to(tl.float32) + 1
    for start in range(first, stop, rows_block):
        rows = (start + tl.arange(0, rows_block))[:, None]
        at, mask = rows * width + columns, (rows < stop) & is_column
        values = tl.load(x + at, mask, 0.0) + gates * tl.load(branch + at, mask, 0.0).to(tl.float32)
        normal, _ = _row_norm(values, is_column, epsilon, width)
        tl.store(y + at, values, mask)
        tl.store(out + at, (normal * scale + shift).to(out.dtype.element_ty), mask)


@triton.jit
def _add_norm_backward_kernel(
    y_grad, out_grad, y, branch, gate, shift_scale, offsets, tiles, x_grad, branch_grad, sums, gate_stride, mod_stride,
    epsilon, width: tl.constexpr, block: tl.constexpr, rows_block: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    sample, first, stop = _norm_tile(offsets, tiles, tile_rows)
    columns = tl.arange(0, block)[None]
    is_column = columns < width
    gates = tl.load(gate + sample * gate_stride + columns, is_column, 0.0).to(tl.float32)
    scale = tl.load(shift_scale + sample * mod_stride + width + columns, is_column, 0.0).to(tl.float32) + 1
    shift_sum = tl.zeros([1, block], tl.float32)
    scale_sum, gate_sum = shift_sum, shift_sum
    for start in range(first, stop, rows_block):
        rows = (start + tl.arange(0, rows_block))[:, None]
        at, mask = rows * width + columns, (rows < stop) & is_column
        normal, rstd = _row_norm(tl.load(y + at, mask, 0.0), is_column, epsilon, width)
        grad = tl.load(out_grad + at, mask, 0.0).to(tl.float32)
        shift_sum += tl.sum(grad, 0)[None]
        scale_sum += tl.sum(grad * normal, 0)[None]
        # Layer norm's gradient: without the mean and the component along the normalized row, times rstd.
        grad *= scale
        grad -= (tl.sum(grad, 1) / width)[:, None] + normal * (tl.sum(grad * normal, 1) / width)[:, None]
        grad = grad * rstd + tl.load(y_grad + at, mask, 0.0)
        gate_sum += tl.sum(grad * tl.load(branch + at, mask, 0.0).to(tl.float32), 0)[None]
        tl.store(x_grad + at, grad, mask)
        tl.store(branch_grad + at, (grad * gates).to(branch_grad.dtype.element_ty), mask)
    sums_at = sums + tl.program_id(0).to(tl.int64) * 3 * width + columns
    tl.store(sums_at, shift_sum, is_column)
    tl.store(sums_at + width, scale_sum, is_column)
    tl.store(sums_at + 2 * width, gate_sum, is_column)


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


def _norm_shape(x_TD: Tensor, gate_BD: Tensor, shift_scale_B2D: Tensor, epsilon: float) -> dict[str, float]:
    width = x_TD.shape[1]
    block = triton.next_power_of_2(width)
    strides = {"gate_stride": gate_BD.stride(0), "mod_stride": shift_scale_B2D.stride(0), "epsilon": epsilon}
    shape = {"width": width, "block": block, "rows_block": min(TILE_ROWS, max(1, NORM_NUMEL // block))}
    return {**strides, **shape, "tile_rows": TILE_ROWS, "num_warps": 4 if block <= 1024 else 8}


@triton_op("mmldlm::add_norm", mutates_args=())
def add_norm(
    x_TD: Tensor, branch_TD: Tensor, gate_BD: Tensor, shift_scale_B2D: Tensor, offsets: Tensor | None = None,
    tiles: Tensor | None = None, dtype: torch.dtype = torch.float32, epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + gate * branch [T, D], and in `dtype` the layer norm of it, scaled and shifted, [T, D].

    `offsets` and `tiles` are those of `ops.SampleRows`; without them row i belongs to sample i.
    """
    y, out = torch.empty_like(x_TD), torch.empty_like(x_TD, dtype=dtype)
    inputs, shape = (x_TD, branch_TD, gate_BD, shift_scale_B2D), _norm_shape(x_TD, gate_BD, shift_scale_B2D, epsilon)
    programs = x_TD.shape[0] if tiles is None else tiles.shape[0]
    wrap_triton(_add_norm_kernel)[(programs,)](*inputs, offsets, tiles, y, out, **shape)
    return y, out


@triton_op("mmldlm::add_norm_backward", mutates_args=())
def add_norm_backward(
    y_grad: Tensor, out_grad: Tensor, y_TD: Tensor, branch_TD: Tensor, gate_BD: Tensor, shift_scale_B2D: Tensor,
    offsets: Tensor | None = None, tiles: Tensor | None = None, epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and branch, and each tile's sums [tiles, 3D] of those of shift, scale and gate."""
    x_grad, branch_grad = torch.empty_like(y_TD), torch.empty_like(branch_TD)
    inputs, shape = (y_TD, branch_TD, gate_BD, shift_scale_B2D), _norm_shape(y_TD, gate_BD, shift_scale_B2D, epsilon)
    programs = y_TD.shape[0] if tiles is None else tiles.shape[0]
    sums = y_TD.new_empty(programs, 3 * y_TD.shape[1])
    wrap_triton(_add_norm_backward_kernel)[(programs,)](
        y_grad, out_grad, *inputs, offsets, tiles, x_grad, branch_grad, sums, **shape
    )
    return x_grad, branch_grad, sums
