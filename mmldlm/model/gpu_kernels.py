"""Triton kernels for the operations that would otherwise pass over a GPU's memory most often.

Shape letters: B samples, T rows of a stream, D width, H heads, K width of a head.
"""

# mypy: disable-error-code="no-untyped-def"
# (A kernel has no type annotations: Triton knows the types of the arguments when it compiles.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.library import triton_op, wrap_triton

from mmldlm.model.ops import EPSILON, TILE_ROWS

PAIRS = 64  # pairs of a row and a head that one program processes
NORM_NUMEL = 4096  # elements that the kernel of a norm has in registers at a time


@triton.jit
def _rotate(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _load_streams(latent, text, at, text_at, mask, is_latent):
    values = tl.load(latent + at, mask & is_latent, 0.0) + tl.load(text + text_at, mask & ~is_latent, 0.0)
    return values.to(tl.float32)


@triton.jit
def _store_streams(latent, text, at, text_at, values, mask, is_latent):
    tl.store(latent + at, values.to(latent.dtype.element_ty), mask & is_latent)
    tl.store(text + text_at, values.to(text.dtype.element_ty), mask & ~is_latent)


@triton.jit
def _head_places(
    part, num_rows, num_latents, heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, pairs: tl.constexpr
):
    # Rows are rows of cat(latents, text), and a pair is a row and a head. Channels k and k + K/2 rotate together, so
    # kernels hold them in two tensors. This function returns the places of channels k.
    pair = (tl.program_id(0) * pairs + tl.arange(0, pairs)).to(tl.int64)[:, None]
    row, channels = pair // heads, tl.arange(0, block)[None]
    at = ((3 * row + part) * heads + pair % heads) * width + channels
    mask = (row < num_rows) & (channels < width // 2)
    text_at, head_at = at - num_latents * 3 * heads * width, pair % heads * width + channels
    return row, row < num_latents, channels, mask, at, text_at, head_at


@triton.jit
def _head_scale(latent_q, latent_k, text_q, text_k, part, channels, is_latent, width: tl.constexpr):
    is_q, is_k = (channels < width) & (part == 0), (channels < width) & (part == 1)
    latent = tl.load(latent_q + channels, is_q, 0.0) + tl.load(latent_k + channels, is_k, 0.0)
    text = tl.load(text_q + channels, is_q, 0.0) + tl.load(text_k + channels, is_k, 0.0)
    return tl.where(is_latent, latent, text).to(tl.float32)


@triton.jit
def _heads_kernel(
    latent, text, latent_q, latent_k, text_q, text_k, cos, sin, inverse, out, num_rows, num_latents, epsilon,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    part, half = tl.program_id(1), width // 2  # part 0: queries, 1: keys, 2: values
    row, is_latent, channels, mask, at, text_at, head_at = _head_places(
        part, num_rows, num_latents, heads, width, block, pairs
    )
    x = _load_streams(latent, text, at, text_at, mask, is_latent)
    y = _load_streams(latent, text, at + half, text_at + half, mask, is_latent)
    if part < 2:
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        x *= rstd * _head_scale(latent_q, latent_k, text_q, text_k, part, channels, is_latent, width)
        y *= rstd * _head_scale(latent_q, latent_k, text_q, text_k, part, channels + half, is_latent, width)
        angle_at, turns = (row - num_latents) * half + channels, mask & ~is_latent
        x, y = _rotate(x, y, tl.load(cos + angle_at, turns, 1.0), tl.load(sin + angle_at, turns, 0.0))
    out_at = out + (part * num_rows + tl.load(inverse + row, row < num_rows, 0)) * heads * width + head_at
    tl.store(out_at, x.to(out.dtype.element_ty), mask)
    tl.store(out_at + half, y.to(out.dtype.element_ty), mask)


@triton.jit
def _heads_backward_kernel(
    q_grad, k_grad, v_grad, latent, text, latent_q, latent_k, text_q, text_k, cos, sin, inverse, latent_grad, text_grad,
    weight_grads, num_rows, num_latents, epsilon, heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    pairs: tl.constexpr,
):  # fmt: skip
    part, half = tl.program_id(1), width // 2
    row, is_latent, channels, mask, at, text_at, head_at = _head_places(
        part, num_rows, num_latents, heads, width, block, pairs
    )
    grad = q_grad
    if part == 1:
        grad = k_grad
    if part == 2:
        grad = v_grad
    grad_at = grad + tl.load(inverse + row, row < num_rows, 0) * heads * width + head_at
    dx, dy = tl.load(grad_at, mask, 0.0).to(tl.float32), tl.load(grad_at + half, mask, 0.0).to(tl.float32)
    if part < 2:
        angle_at, turns = (row - num_latents) * half + channels, mask & ~is_latent
        # The adjoint of a rotation turns back.
        dx, dy = _rotate(dx, dy, tl.load(cos + angle_at, turns, 1.0), -tl.load(sin + angle_at, turns, 0.0))
        x = _load_streams(latent, text, at, text_at, mask, is_latent)
        y = _load_streams(latent, text, at + half, text_at + half, mask, is_latent)
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1) / width + epsilon)[:, None]
        x, y = x * rstd, y * rstd
        # The sums of all programs stand side by side, so that one kernel can add them: sums of latents, then of text.
        programs, is_channel = tl.num_programs(0), channels < half
        sums_at = weight_grads + (part * width + channels) * programs + tl.program_id(0)
        tl.store(sums_at, tl.sum(tl.where(is_latent, dx * x, 0.0), 0)[None], is_channel)
        tl.store(sums_at + half * programs, tl.sum(tl.where(is_latent, dy * y, 0.0), 0)[None], is_channel)
        sums_at += 2 * width * programs
        tl.store(sums_at, tl.sum(tl.where(is_latent, 0.0, dx * x), 0)[None], is_channel)
        tl.store(sums_at + half * programs, tl.sum(tl.where(is_latent, 0.0, dy * y), 0)[None], is_channel)
        dx *= _head_scale(latent_q, latent_k, text_q, text_k, part, channels, is_latent, width)
        dy *= _head_scale(latent_q, latent_k, text_q, text_k, part, channels + half, is_latent, width)
        # The gradient of RMS norm drops the component along the normalized vector, and is scaled by rstd.
        projection = (tl.sum(dx * x + dy * y, 1) / width)[:, None]
        dx, dy = (dx - x * projection) * rstd, (dy - y * projection) * rstd
    _store_streams(latent_grad, text_grad, at, text_at, dx, mask, is_latent)
    _store_streams(latent_grad, text_grad, at + half, text_at + half, dy, mask, is_latent)


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
        # The gradient of layer norm drops the mean and the component along the normalized row, and is scaled by rstd.
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


def _heads_launch(inputs: list[Tensor]) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of programs and the sizes, for the forward and the backward kernel of heads."""
    num_latents, (num_texts, _, heads, width) = inputs[0].shape[0], inputs[1].shape
    num_rows, block = num_latents + num_texts, triton.next_power_of_2(width // 2)
    pairs, sizes = max(1, 32 * PAIRS // block), {"num_rows": num_rows, "num_latents": num_latents, "epsilon": EPSILON}
    shape = {"heads": heads, "width": width, "block": block, "pairs": pairs}
    return (triton.cdiv(num_rows * heads, pairs), 3), {**sizes, **shape}


@triton_op("mmldlm::joint_heads", mutates_args=())
def _joint_heads(inputs: list[Tensor]) -> Tensor:
    programs, sizes = _heads_launch(inputs)
    out = inputs[1].new_empty(3, sizes["num_rows"], *inputs[1].shape[2:])
    wrap_triton(_heads_kernel)[programs](*inputs, out, **sizes)
    return out


@triton_op("mmldlm::joint_heads_backward", mutates_args=())
def _joint_heads_backward(grads: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    programs, sizes = _heads_launch(inputs)
    latent_grad, text_grad = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    weight_grads = text_grad.new_empty(4, text_grad.shape[3], programs[0], dtype=torch.float32)
    wrap_triton(_heads_backward_kernel)[programs](*grads, *inputs, latent_grad, text_grad, weight_grads, **sizes)
    return latent_grad, text_grad, weight_grads.sum(-1)


class JointHeads(Function):
    """`ops.normalize_heads` of both streams into the rows of joint attention, in one pass over memory each way.

    The arguments are q, k and v of latents [B*M, 3, H, K] and text [N, 3, H, K], the scales of latents and text, cosine
    and sine of the text's positions, and the joint row of each row of cat(latents, text). All sums have a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return _joint_heads([*inputs]).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        latent_grad, text_grad, sums = _joint_heads_backward([grad.contiguous() for grad in grads], [*inputs])
        scale_grads = (sum_K.to(scale.dtype) for sum_K, scale in zip(sums, inputs[2:6], strict=True))
        return latent_grad, text_grad, *scale_grads, None, None, None


def _norm_launch(inputs: list[Tensor]) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid of programs and the sizes, for the forward and the backward kernel of norms."""
    x_TD, _, gate_BD, shift_scale_B2D, *places = inputs
    width, block = x_TD.shape[1], triton.next_power_of_2(x_TD.shape[1])
    sizes = {"gate_stride": gate_BD.stride(0), "mod_stride": shift_scale_B2D.stride(0), "epsilon": EPSILON}
    sizes |= {"width": width, "block": block, "rows_block": min(TILE_ROWS, max(1, NORM_NUMEL // block))}
    sizes |= {"tile_rows": TILE_ROWS, "num_warps": 4 if block <= 1024 else 8}
    return ((places[1] if places else x_TD).shape[0],), sizes


@triton_op("mmldlm::add_norm", mutates_args=())
def add_norm(inputs: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y = x + gate * branch [T, D], and the layer norm of y, scaled and shifted, in `dtype` [T, D].

    The inputs are x, branch, gate and (shift, scale). Unless row i belongs to sample i, `offsets` and `tiles` of
    `ops.SampleRows` follow.
    """
    programs, sizes = _norm_launch(inputs)
    y, out = torch.empty_like(inputs[0]), torch.empty_like(inputs[0], dtype=dtype)
    wrap_triton(_add_norm_kernel)[programs](*inputs, *[None] * (6 - len(inputs)), y, out, **sizes)
    return y, out


@triton_op("mmldlm::add_norm_backward", mutates_args=())
def add_norm_backward(grads: list[Tensor], inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and branch, and the sums of each tile's gradients of shift, scale and gate [tiles, 3D].

    The inputs are the same as for `add_norm`, with y in the place of x. `grads` are the gradients of its two results.
    """
    programs, sizes = _norm_launch(inputs)
    x_grad, branch_grad = torch.empty_like(inputs[0]), torch.empty_like(inputs[1])
    sums = x_grad.new_empty(programs[0], 3 * x_grad.shape[1])
    wrap_triton(_add_norm_backward_kernel)[programs](
        *grads, *inputs, *[None] * (6 - len(inputs)), x_grad, branch_grad, sums, **sizes
    )
    return x_grad, branch_grad, sums
