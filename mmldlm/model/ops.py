"""The work of a block between its matrix products, as operations with gradients of their own.

Left to itself autograd keeps every intermediate result. Each of these keeps its inputs alone and computes the rest
again in backward, which takes fewer passes over memory too. Under `torch.compile`, which decides by itself what to
keep, each is its plain formula. All compute in float32, whatever their inputs are. On a CPU they take rows in pieces
that fit into a core's cache together with what is made of them.

Shape letters: B samples, T rows of a stream, D width, H heads, K width of a head, F hidden width.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mmldlm.model.cpu_linear import leaves_autocast

EPSILON = 1e-6
PIECE = 2**17  # numbers of a tensor, for each thread: 512 KiB in float32
_most_pieces = ContextVar("most_pieces", default=sys.maxsize)


@contextmanager
def in_pieces(most: int) -> Iterator[None]:
    """No more pieces of a tensor than this: for tensors without memory, where each only costs time; 1: as on a GPU."""
    token = _most_pieces.set(most)
    try:
        yield
    finally:
        _most_pieces.reset(token)


def gather_rows(table_BD: Tensor, rows_T: Tensor | None) -> Tensor:
    """[T, D]: the sample's entry for each row; without `rows_T`, rows are samples."""
    return table_BD if rows_T is None else table_BD.index_select(0, rows_T)


def _scatter_to_samples(sums_BD: Tensor, rows_T: Tensor | None, values_TD: Tensor) -> None:
    """The adjoint of `gather_rows`."""
    if rows_T is None:
        sums_BD.add_(values_TD)
    else:
        sums_BD.index_add_(0, rows_T, values_TD)


def _pieces(*tensors: Any) -> Iterable[tuple[Any, ...]]:
    """The same rows of all tensors, a piece at a time on a CPU; all at once elsewhere, or where one is None."""
    first = tensors[0]
    size = max(PIECE * torch.get_num_threads(), first.numel() // _most_pieces.get())
    if first.device.type != "cpu" or first.numel() <= size or any(each is None for each in tensors):
        return [tensors]
    rows = max(1, size * len(first) // first.numel())
    return zip(*(each.split(rows) for each in tensors), strict=True)


def _normalized(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x with mean 0 and variance 1 along D, float32, and the factor [T, 1] that was needed."""
    normal, _, rstd = torch.native_layer_norm(x_TD.float(), x_TD.shape[-1:], None, None, EPSILON)
    return normal, rstd


def _modulated(
    normal_TD: Tensor, shift_BD: Tensor, scale_BD: Tensor, rows_T: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out_TD = torch.empty_like(normal_TD, dtype=dtype)
    for normal, rows, out in _pieces(normal_TD, rows_T, out_TD):
        torch.addcmul(gather_rows(shift_BD, rows), normal, gather_rows(scale_BD, rows), out=out)
    return out_TD


def _of_product(x: Tensor) -> torch.dtype:
    """What a matrix product with `x` is computed in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _ModulatedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        shift_BD: Tensor,
        scale_BD: Tensor,
        rows_T: Tensor | None,
        weight_OD: Tensor,
        bias_O: Tensor | None,
    ) -> Tensor:
        normal, rstd = _normalized(x_TD)
        shift, scale = shift_BD.float(), scale_BD.float() + 1
        ctx.save_for_backward(normal, rstd, shift, scale, rows_T, weight_OD)
        ctx.dtypes = x_TD.dtype, shift_BD.dtype, scale_BD.dtype
        return F.linear(_modulated(normal, shift, scale, rows_T, _of_product(weight_OD)), weight_OD, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        normal, rstd, shift, scale, rows, weight = ctx.saved_tensors
        of_x, of_shift, of_scale = ctx.dtypes
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[4]:
            weight_grad = _weight_grad(grad_TO, _modulated(normal, shift, scale, rows, grad_TO.dtype), weight)
        if ctx.needs_input_grad[5]:
            bias_grad = grad_TO.sum(0).to(weight.dtype)
        grad = grad_TO @ weight.to(grad_TO.dtype)
        x_grad, shift_grad, scale_grad = _modulation_gradients(grad, normal, rstd, scale, rows)
        return x_grad.to(of_x), shift_grad.to(of_shift), scale_grad.to(of_scale), None, weight_grad, bias_grad


def _modulation_gradients(
    grad_TD: Tensor, normal_TD: Tensor, rstd_T1: Tensor, scale_BD: Tensor, rows_T: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of x, shift and scale, from that of `_modulated`."""
    x_grad_TD = torch.empty_like(normal_TD)
    shift_grad, scale_grad = torch.zeros_like(scale_BD), torch.zeros_like(scale_BD)
    for half, normal, rstd, rows, out in _pieces(grad_TD, normal_TD, rstd_T1, rows_T, x_grad_TD):
        grad = half.float()
        _scatter_to_samples(shift_grad, rows, grad)
        _scatter_to_samples(scale_grad, rows, grad * normal)
        torch.mul(_normalized_gradient(grad * gather_rows(scale_BD, rows), normal), rstd, out=out)
    return x_grad_TD, shift_grad, scale_grad


def _normalized_gradient(grad_TD: Tensor, normal_TD: Tensor) -> Tensor:
    """What layer norm's gradient is but for the factor: of something with mean 0 and variance 1."""
    mean, width = normal_TD.new_zeros(len(normal_TD), 1), normal_TD.shape[-1:]
    found: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad_TD, normal_TD, width, mean, mean + 1, None, None, [True, False, False]
    )[0]
    return found


def _weight_grad(grad_TO: Tensor, input_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """That of `weight_OI` in `F.linear(input_TI, weight_OI)`."""
    return (grad_TO.t() @ input_TI.to(grad_TO.dtype)).to(weight_OI.dtype)


def modulate(x_TD: Tensor, shift_BD: Tensor, scale_BD: Tensor, rows_T: Tensor | None) -> Tensor:
    """Layer norm without parameters, then scaled by 1 + scale and shifted as the row's sample says; [T, D] float32."""
    normal = F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=EPSILON)
    return normal * gather_rows(scale_BD.float() + 1, rows_T) + gather_rows(shift_BD.float(), rows_T)


def modulated_linear(
    x_TD: Tensor,
    shift_BD: Tensor,
    scale_BD: Tensor,
    rows_T: Tensor | None,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
) -> Tensor:
    """The linear map [T, O] of `modulate`; keeps [T, D] once, for both."""
    if torch.compiler.is_compiling():
        return F.linear(modulate(x_TD, shift_BD, scale_BD, rows_T), weight_OD, bias_O)
    with leaves_autocast(x_TD, weight_OD):
        return _ModulatedLinear.apply(x_TD, shift_BD, scale_BD, rows_T, weight_OD, bias_O)


class _AddGated(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows_T: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_BD, branch_TD, rows_T)
        gate = gate_BD.float()
        out_TD = torch.empty_like(x_TD)
        for x, branch, rows, out in _pieces(x_TD, branch_TD, rows_T, out_TD):
            torch.addcmul(x, gather_rows(gate, rows), branch.float(), out=out)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate_BD, branch_TD, rows_T = ctx.saved_tensors
        gate = gate_BD.float()
        gate_grad, branch_grad = torch.zeros_like(gate), torch.empty_like(branch_TD)
        for part, branch, rows, out in _pieces(grad, branch_TD, rows_T, branch_grad):
            _scatter_to_samples(gate_grad, rows, part * branch)
            torch.mul(part, gather_rows(gate, rows), out=out)
        return grad, gate_grad.to(gate_BD.dtype), branch_grad, None


def add_gated(x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows_T: Tensor | None) -> Tensor:
    """x + gate * branch, the gate as the row's sample says; x and result [T, D] float32."""
    if torch.compiler.is_compiling():
        return x_TD + gather_rows(gate_BD.float(), rows_T) * branch_TD.float()
    return _AddGated.apply(x_TD, gate_BD, branch_TD, rows_T)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, hidden_T2F: Tensor, weight_OF: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_T2F, weight_OF)
        gate, value = hidden_T2F.chunk(2, dim=-1)
        gated = F.silu(gate).mul_(value)
        return gated if weight_OF is None else F.linear(gated, weight_OF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gate, value = hidden.chunk(2, dim=-1)
        silu, weight_grad = F.silu(gate), None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                weight_grad = _weight_grad(grad, silu * value, weight)
            grad = grad @ weight.to(grad.dtype)
        hidden_grad = torch.empty_like(hidden)
        gate_grad, value_grad = hidden_grad.chunk(2, dim=-1)
        torch.mul(grad, silu, out=value_grad)
        torch.ops.aten.silu_backward.grad_input(torch.mul(grad, value, out=silu), gate, grad_input=gate_grad)
        return hidden_grad, weight_grad


def swiglu(hidden_T2F: Tensor) -> Tensor:
    """SiLU of the first half times the second (arXiv 2002.05202); [T, F]."""
    if torch.compiler.is_compiling():
        gate, value = hidden_T2F.chunk(2, dim=-1)
        return F.silu(gate) * value
    return _SwiGLU.apply(hidden_T2F, None)


def swiglu_linear(hidden_T2F: Tensor, weight_OF: Tensor) -> Tensor:
    """The linear map [T, O] of `swiglu`, whose result is computed again in backward."""
    if torch.compiler.is_compiling():
        return F.linear(swiglu(hidden_T2F), weight_OF)
    with leaves_autocast(hidden_T2F, weight_OF):
        return _SwiGLU.apply(hidden_T2F, weight_OF)


class _NormaliseHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv_T3HK: Tensor, weight_2K: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        ctx.save_for_backward(qkv_T3HK, weight_2K, cos, sin)
        out_T3HK = torch.empty_like(qkv_T3HK)
        for qkv, cosine, sine, out in _pieces(qkv_T3HK, cos, sin, out_T3HK):
            out[:, 2] = qkv[:, 2]
            qk = qkv[:, :2].float()
            _apply_rotary((qk * _inverse_rms(qk)).mul_(weight_2K[:, None]), cosine, sine, out[:, :2])
        return out_T3HK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T3HK: Tensor) -> tuple[Tensor, Tensor, None, None]:
        qkv_T3HK, weight, cos, sin = ctx.saved_tensors
        back = None if sin is None else -sin
        weight_grad, qkv_grad_T3HK = torch.zeros_like(weight), torch.empty_like(qkv_T3HK)
        for qkv, grad, cosine, sine, qkv_grad in _pieces(qkv_T3HK, grad_T3HK, cos, back, qkv_grad_T3HK):
            qk = qkv[:, :2].float()
            rstd = _inverse_rms(qk)
            normal = qk * rstd
            inner = torch.empty_like(normal)
            _apply_rotary(grad[:, :2].float(), cosine, sine, inner)
            # Rows first: a sum over two dimensions that are not neighbors takes eight times as long on a CPU.
            weight_grad += (inner * normal).flatten(1).sum(0).view(qk.shape[1:]).sum(1)
            inner.mul_(weight[:, None])
            along = torch.linalg.vecdot(inner, normal).unsqueeze(-1) / qk.shape[-1]
            qkv_grad[:, 2] = grad[:, 2]
            torch.mul(inner.addcmul_(normal, along, value=-1), rstd, out=qkv_grad[:, :2])
        return qkv_grad_T3HK, weight_grad, None, None


def _inverse_rms(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(EPSILON).rsqrt_()


def _apply_rotary(x_T2HK: Tensor, cos: Tensor | None, sin: Tensor | None, out: Tensor) -> None:
    """Write `x` (float32), turned by the angles if there are any, to `out`."""
    if cos is None or sin is None:
        out.copy_(x_T2HK)
        return
    exact = out if out.dtype == torch.float32 else torch.empty_like(x_T2HK)
    first, second = x_T2HK.chunk(2, dim=-1)
    left, right = exact.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    if exact is not out:
        out.copy_(exact)


def normalize_heads(qkv_T3HK: Tensor, weight_2K: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """q and k normalized to unit root mean square and scaled (arXiv 2302.05442), then turned; v as it is.

    `weight_2K` scales q and k. `rotary`, cosine and sine [T, K/2] of each row's position, turns each pair
    (k, k + K/2) of a head (RoFormer, arXiv 2104.09864, eq. 34).
    """
    cos, sin = (None, None) if rotary is None else (part[:, None, None] for part in rotary)
    if torch.compiler.is_compiling():
        qk = F.rms_norm(qkv_T3HK[:, :2].float(), qkv_T3HK.shape[-1:], eps=EPSILON) * weight_2K[:, None]
        if cos is not None and sin is not None:
            first, second = qk.chunk(2, dim=-1)
            qk = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([qk.to(qkv_T3HK.dtype), qkv_T3HK[:, 2:]], dim=1)
    return _NormaliseHeads.apply(qkv_T3HK, weight_2K, cos, sin)
