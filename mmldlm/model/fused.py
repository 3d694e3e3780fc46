"""The work of a block between its matrix products, as operations with gradients of their own.

Left to itself autograd keeps every intermediate result. Each of these keeps its inputs alone and computes the rest
again in backward, which takes fewer passes over memory too. Under `torch.compile`, which decides by itself what to
keep, each is its plain formula. All compute in float32, whatever their inputs are.

Shape letters: B samples, T rows of a stream, D width, H heads, K width of a head, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mmldlm.model.products import linear_of_rows, rows_product, weight_gradient

EPSILON = 1e-6


def of_rows(table_BD: Tensor, rows_T: Tensor | None) -> Tensor:
    """[T, D]: the sample's entry for each row; without `rows_T`, rows are samples."""
    return table_BD if rows_T is None else table_BD.index_select(0, rows_T)


def of_samples(values_TD: Tensor, rows_T: Tensor | None, count: int) -> Tensor:
    """[B, D]: the sum over the rows of each sample; the adjoint of `of_rows`."""
    if rows_T is None:
        return values_TD
    return values_TD.new_zeros(count, values_TD.shape[1]).index_add_(0, rows_T, values_TD)


def _normalised(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x with mean 0 and variance 1 along D, float32, and the factor [T, 1] that was needed."""
    normal, _, rstd = torch.native_layer_norm(x_TD.float(), x_TD.shape[-1:], None, None, EPSILON)
    return normal, rstd


def _modulated(normal_TD: Tensor, shift_BD: Tensor, scale_TD: Tensor, rows_T: Tensor | None) -> Tensor:
    return torch.addcmul(of_rows(shift_BD, rows_T), normal_TD, scale_TD)


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
        normal, rstd = _normalised(x_TD)
        shift, scale = shift_BD.float(), scale_BD.float() + 1
        ctx.save_for_backward(normal, rstd, shift, scale, rows_T, weight_OD)
        ctx.dtypes = x_TD.dtype, shift_BD.dtype, scale_BD.dtype
        return linear_of_rows(_modulated(normal, shift, of_rows(scale, rows_T), rows_T), weight_OD, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        normal, rstd, shift, scale, rows, weight = ctx.saved_tensors
        of_x, of_shift, of_scale = ctx.dtypes
        scale_of_row = of_rows(scale, rows)
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[4]:
            weight_grad = weight_gradient(grad_TO, _modulated(normal, shift, scale_of_row, rows), weight)
        if ctx.needs_input_grad[5]:
            bias_grad = grad_TO.sum(0).to(weight.dtype)
        grad = rows_product(grad_TO, weight.to(grad_TO.dtype)).float()
        shift_grad = of_samples(grad, rows, len(scale))
        scale_grad = of_samples(grad * normal, rows, len(scale))
        inner = grad * scale_of_row
        along = torch.linalg.vecdot(inner, normal).unsqueeze(-1) / inner.shape[-1]
        x_grad = inner.sub_(inner.mean(-1, keepdim=True)).addcmul_(normal, along, value=-1).mul_(rstd)
        return x_grad.to(of_x), shift_grad.to(of_shift), scale_grad.to(of_scale), None, weight_grad, bias_grad


def modulate(x_TD: Tensor, shift_BD: Tensor, scale_BD: Tensor, rows_T: Tensor | None) -> Tensor:
    """Layer norm without parameters, then scaled by 1 + scale and shifted as the row's sample says; [T, D] float32."""
    normal = F.layer_norm(x_TD.float(), x_TD.shape[-1:], eps=EPSILON)
    return normal * of_rows(scale_BD.float() + 1, rows_T) + of_rows(shift_BD.float(), rows_T)


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
    return _ModulatedLinear.apply(x_TD, shift_BD, scale_BD, rows_T, weight_OD, bias_O)


class _AddGated(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows_T: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_BD, branch_TD, rows_T)
        return torch.addcmul(x_TD, of_rows(gate_BD.float(), rows_T), branch_TD.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, branch, rows = ctx.saved_tensors
        gate_grad = of_samples(grad * branch, rows, len(gate))
        branch_grad = grad * of_rows(gate.float(), rows)
        return grad, gate_grad.to(gate.dtype), branch_grad.to(branch.dtype), None


def add_gated(x_TD: Tensor, gate_BD: Tensor, branch_TD: Tensor, rows_T: Tensor | None) -> Tensor:
    """x + gate * branch, the gate as the row's sample says; x and result [T, D] float32."""
    if torch.compiler.is_compiling():
        return x_TD + of_rows(gate_BD.float(), rows_T) * branch_TD.float()
    return _AddGated.apply(x_TD, gate_BD, branch_TD, rows_T)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, hidden_T2F: Tensor, weight_OF: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_T2F, weight_OF)
        gate, value = hidden_T2F.chunk(2, dim=-1)
        gated = F.silu(gate).mul_(value)
        return gated if weight_OF is None else linear_of_rows(gated, weight_OF, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gate, value = hidden.chunk(2, dim=-1)
        silu, weight_grad = F.silu(gate), None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                weight_grad = weight_gradient(grad, silu * value, weight)
            grad = rows_product(grad, weight.to(grad.dtype))
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
    return _SwiGLU.apply(hidden_T2F, weight_OF)


class _NormaliseHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv_T3HK: Tensor, weight_2K: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        ctx.save_for_backward(qkv_T3HK, weight_2K, cos, sin)
        out = torch.empty_like(qkv_T3HK)
        out[:, 2] = qkv_T3HK[:, 2]
        qk = qkv_T3HK[:, :2].float()
        _turn((qk * _inverse_rms(qk)).mul_(weight_2K[:, None]), cos, sin, out[:, :2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        qkv, weight, cos, sin = ctx.saved_tensors
        qk = qkv[:, :2].float()
        rstd = _inverse_rms(qk)
        normal = qk * rstd
        inner = torch.empty_like(normal)
        _turn(grad[:, :2].float(), cos, None if sin is None else -sin, inner)
        # Rows first: a sum over two dimensions that are not neighbours takes eight times as long on a CPU.
        weight_grad = (inner * normal).flatten(1).sum(0).view(qk.shape[1:]).sum(1)
        inner.mul_(weight[:, None])
        along = torch.linalg.vecdot(inner, normal).unsqueeze(-1) / qk.shape[-1]
        qkv_grad = torch.empty_like(qkv)
        qkv_grad[:, 2] = grad[:, 2]
        torch.mul(inner.addcmul_(normal, along, value=-1), rstd, out=qkv_grad[:, :2])
        return qkv_grad, weight_grad, None, None


def _inverse_rms(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(EPSILON).rsqrt_()


def _turn(x_T2HK: Tensor, cos: Tensor | None, sin: Tensor | None, out: Tensor) -> None:
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


def normalise_heads(qkv_T3HK: Tensor, weight_2K: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """q and k normalised to unit root mean square and scaled (arXiv 2302.05442), then turned; v as it is.

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
