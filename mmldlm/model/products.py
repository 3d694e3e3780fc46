"""Products of matrices over rows, of which there is another number in each micro-batch.

On a CPU the kernels for half precision (oneDNN's) are made anew for each shape, which takes 3 to 4 ms, as long as a few
products do, and what was made for shapes that never come again breaks the heap into pieces. So there the rows go in a
multiple of `ROWS`, and the rest of them with zeros up to that many. All else, and few rows, is the plain product.

Shape letters: T rows of a stream, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

ROWS = 64
HALF = (torch.bfloat16, torch.float16)


def half_on_cpu(x: Tensor) -> torch.dtype | None:
    """What a product with `x` is computed in, autocast included, if kernels are made for its shape; else None."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return dtype if dtype in HALF else None


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear`, [T, O]."""
    if half_on_cpu(x_TI) is None:
        return F.linear(x_TI, weight_OI, bias_O)
    return _Linear.apply(x_TI, weight_OI, bias_O)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.of_x, x_TI = x_TI.dtype, x_TI.to(half_on_cpu(x_TI))
        ctx.save_for_backward(x_TI, weight_OI)
        return linear_of_rows(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            rows_product(grad_TO, weight.to(grad_TO.dtype)).to(ctx.of_x) if needs_x else None,
            weight_gradient(grad_TO, x, weight) if needs_weight else None,
            grad_TO.sum(0).to(weight.dtype) if needs_bias else None,
        )


def linear_of_rows(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear` without a gradient, for operations that have their own."""
    dtype = half_on_cpu(x_TI)
    if dtype is None:
        return F.linear(x_TI, weight_OI, bias_O)
    out = rows_product(x_TI.to(dtype), weight_OI.to(dtype).t())
    return out if bias_O is None else out.add_(bias_O.to(dtype))


def rows_product(x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
    """x @ matrix, without a gradient; [T, O]."""
    whole, rest = _shared_out(x_TI)
    if not rest:
        return x_TI @ matrix_IO
    out = x_TI.new_empty(len(x_TI), matrix_IO.shape[1])
    torch.mm(x_TI[:whole], matrix_IO, out=out[:whole])
    out[whole:] = (_filled_up(x_TI[whole:]) @ matrix_IO)[:rest]
    return out


def weight_gradient(grad_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """That of `weight_OI` in `F.linear(x_TI, weight_OI)`, in the weight's type."""
    x_TI = x_TI.to(grad_TO.dtype)
    whole, rest = _shared_out(x_TI)
    if not rest:
        return (grad_TO.t() @ x_TI).to(weight_OI.dtype)
    of_rest = _filled_up(grad_TO[whole:]).t() @ _filled_up(x_TI[whole:])
    return (grad_TO[:whole].t() @ x_TI[:whole]).to(weight_OI.dtype).add_(of_rest)


def _shared_out(x_TI: Tensor) -> tuple[int, int]:
    """How many rows go by themselves, and how many need others."""
    rest = len(x_TI) % ROWS if len(x_TI) > ROWS and half_on_cpu(x_TI) is not None else 0
    return len(x_TI) - rest, rest


def _filled_up(x_TI: Tensor) -> Tensor:
    """Fewer rows than `ROWS`, and zeros."""
    return F.pad(x_TI, (0, 0, 0, ROWS - len(x_TI)))
