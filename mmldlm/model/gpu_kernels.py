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
def _load_streams(latent, text, at, text_at, mask, is_latent):
    return tl.load(latent + at, mask & is_latent, 0.0) + tl.load(text + text_at, mask & ~is_latent, 0.0)


@triton.jit
def _store_streams(latent, text, at, text_at, values, mask, is_latent):
    tl.store(latent + at, values, mask & is_latent)
    tl.store(text + text_at, values, mask & ~is_latent)


@triton.jit
def _head_pairs(num_rows, heads: tl.constexpr, pairs: tl.constexpr):
    # Rows are those of cat(latents, text), pairs those of a row and a head.
    pair = (tl.program_id(0) * pairs + tl.arange(0, pairs)).to(tl.int64)[:, None]
    return pair // heads, pair % heads, pair < num_rows * heads


@triton.jit
def _head_places(row, head, part, num_latents, channels, heads: tl.constexpr, width: tl.constexpr):
    at = ((3 * row + part) * heads + head) * width + channels
    return at, at - num_latents * 3 * heads * width, (row - num_latents) * (width // 2) + channels


@triton.jit
def _head_scale(latent, text, channels, is_latent, width: tl.constexpr):
    latent_scale = tl.load(latent + channels, channels < width, 0.0).to(tl.float32)
    return tl.where(is_latent, latent_scale, tl.load(text + channels, channels < width, 0.0).to(tl.float32))


@triton.jit
def _heads_kernel(
    latent, text, latent_q, latent_k, text_q, text_k, cos, sin, inverse, out, num_rows, num_latents, epsilon,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)  # 0: queries, 1: keys, 2: values
    row, head, is_pair = _head_pairs(num_rows, heads, pairs)
    # Channels k and k + K/2, which turn together, are elements of two tensors.
    channels, is_latent, half = tl.arange(0, block)[None], row < num_latents, width // 2
    mask = is_pair & (channels < half)
    at, text_at, angle_at = _head_places(row, head, part, num_latents, channels, heads, width)
    joint_at = (tl.load(inverse + row, is_pair, 0) * heads + head) * width + channels
    first = _load_streams(latent, text, at, text_at, mask, is_latent)
    second = _load_streams(latent, text, at + half, text_at + half, mask, is_latent)
    if part < 2:
        latent_weight, text_weight = latent_q, text_q
        if part == 1:
            latent_weight, text_weight = latent_k, text_k
        x, y = first.to(tl.float32), second.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        x *= rstd * _head_scale(latent_weight, text_weight, channels, is_latent, width)
        y *= rstd * _head_scale(latent_weight, text_weight, channels + half, is_latent, width)
        turns = mask & ~is_latent
        x, y = _rotate(x, y, tl.load(cos + angle_at, turns, 1.0), tl.load(sin + angle_at, turns, 0.0))
        first, second = x.to(first.dtype), y.to(first.dtype)
    out_at = out + part.to(tl.int64) * num_rows * heads * width + joint_at
    tl.store(out_at, first, mask)
    tl.store(out_at + half, second, mask)


@triton.jit
def _heads_backward_kernel(
    q_grad, k_grad, v_grad, latent, text, latent_q, latent_k, text_q, text_k, cos, sin, inverse, latent_grad, text_grad,
    weight_grads, num_rows, num_latents, epsilon, heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    pairs: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    row, head, is_pair = _head_pairs(num_rows, heads, pairs)
    # Channels k and k + K/2, which turn together, are elements of two tensors.
    channels, is_latent, half = tl.arange(0, block)[None], row < num_latents, width // 2
    mask = is_pair & (channels < half)
    at, text_at, angle_at = _head_places(row, head, part, num_latents, channels, heads, width)
    joint_at = (tl.load(inverse + row, is_pair, 0) * heads + head) * width + channels
    grad = q_grad
    if part == 1:
        grad = k_grad
    if part == 2:
        grad = v_grad
    first, second = tl.load(grad + joint_at, mask, 0.0), tl.load(grad + joint_at + half, mask, 0.0)
    if part < 2:
        latent_weight, text_weight = latent_q, text_q
        if part == 1:
            latent_weight, text_weight = latent_k, text_k
        turns = mask & ~is_latent
        # The adjoint of a rotation turns back.
        cosine, sine = tl.load(cos + angle_at, turns, 1.0), -tl.load(sin + angle_at, turns, 0.0)
        dx, dy = _rotate(first.to(tl.float32), second.to(tl.float32), cosine, sine)
        x = _load_streams(latent, text, at, text_at, mask, is_latent).to(tl.float32)
        y = _load_streams(latent, text, at + half, text_at + half, mask, is_latent).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        x, y = x * rstd, y * rstd
        # Of latents, then text, sums of programs are side by side: the sum over programs is then one kernel.
        programs, is_channel = tl.num_programs(0), channels < half
        sums_at = weight_grads + (part * width + channels) * programs + tl.program_id(0)
        tl.store(sums_at, tl.sum(tl.where(is_latent, dx * x, 0.0), 0)[None], is_channel)
        tl.store(sums_at + half * programs, tl.sum(tl.where(is_latent, dy * y, 0.0), 0)[None], is_channel)
        sums_at += 2 * width * programs
        tl.store(sums_at, tl.sum(tl.where(is_latent, 0.0, dx * x), 0)[None], is_channel)
        tl.store(sums_at + half * programs, tl.sum(tl.where(is_latent, 0.0, dy * y), 0)[None], is_channel)
        dx *= _head_scale(latent_weight, text_weight, channels, is_latent, width)
        dy *= _head_scale(latent_weight, text_weight, channels + half, is_latent, width)
        # RMS norm's gradient: without the component along the normalized vector, times rstd.
        projection = (tl.sum(dx * x + dy * y, 1) / width)[:, None]
        first, second = ((dx - x * projection) * rstd).to(first.dtype), ((dy - y * projection) * rstd).to(first.dtype)
    _store_streams(latent_grad, text_grad, at, text_at, first, mask, is_latent)
    _store_streams(latent_grad, text_grad, at + half, text_at + half, second, mask, is_latent)


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


def _heads_launch(latent: Tensor, text: Tensor, epsilon: float) -> tuple[tuple[int, int], dict[str, float]]:
    """Return the grid of programs and the sizes that both kernels of heads take."""
    heads, width = text.shape[2:]
    block = triton.next_power_of_2(width // 2)
    pairs, num_rows = max(1, 32 * PAIRS // block), len(latent) + len(text)
    sizes = {"num_rows": num_rows, "num_latents": len(latent), "epsilon": epsilon}
    shape = {"heads": heads, "width": width, "block": block, "pairs": pairs}
    return (triton.cdiv(num_rows * heads, pairs), 3), {**sizes, **shape}


@triton_op("mmldlm::joint_heads", mutates_args=())
def _joint_heads(
    latent: Tensor, text: Tensor, latent_q: Tensor, latent_k: Tensor, text_q: Tensor, text_k: Tensor, cos: Tensor,
    sin: Tensor, inverse: Tensor, epsilon: float,
) -> Tensor:  # fmt: skip
    inputs, (grid, sizes) = (latent, text, latent_q, latent_k, text_q, text_k), _heads_launch(latent, text, epsilon)
    out = text.new_empty(3, len(latent) + len(text), *text.shape[2:])
    wrap_triton(_heads_kernel)[grid](*inputs, cos, sin, inverse, out, **sizes)
    return out


@triton_op("mmldlm::joint_heads_backward", mutates_args=())
def _joint_heads_backward(
    q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, latent: Tensor, text: Tensor, latent_q: Tensor, latent_k: Tensor,
    text_q: Tensor, text_k: Tensor, cos: Tensor, sin: Tensor, inverse: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    inputs, (grid, sizes) = (latent, text, latent_q, latent_k, text_q, text_k), _heads_launch(latent, text, epsilon)
    latent_grad, text_grad = torch.empty_like(latent), torch.empty_like(text)
    weight_grads = text.new_empty(4, text.shape[3], grid[0], dtype=torch.float32)
    wrap_triton(_heads_backward_kernel)[grid](
        q_grad, k_grad, v_grad, *inputs, cos, sin, inverse, latent_grad, text_grad, weight_grads, **sizes
    )
    return latent_grad, text_grad, weight_grads.sum(-1)


class JointHeads(Function):
    """`ops.normalize_heads` of both streams into the rows of joint attention, in one pass over memory each way.

    Arguments are q, k and v of latents [B*M, 3, H, K] and text [N, 3, H, K], the scales of both, cosine and sine of the
    text's positions, and the place of each row of cat(latents, text) among the joint rows. Sums are in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.epsilon = args
        ctx.save_for_backward(*tensors)
        return _joint_heads(*args).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        latent_grad, text_grad, sums = _joint_heads_backward(
            *(grad.contiguous() for grad in grads), *saved, ctx.epsilon
        )
        weight_grads = (sum_K.to(weight.dtype) for sum_K, weight in zip(sums, saved[2:6], strict=True))
        return latent_grad, text_grad, *weight_grads, None, None, None, None


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
