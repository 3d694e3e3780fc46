"""Products in half precision on a CPU: the same numbers in few shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.model.attention import _HalfOnCPU
from mmldlm.model.products import ROWS, linear

pytestmark = pytest.mark.quick


class Shapes(TorchDispatchMode):
    """Of all operands of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.found |= {tuple(each.shape) for each in args if each.dim() == 2}
        return func(*args, **(kwargs or {}))


def passes(rows: int, dtype: torch.dtype, bias: bool, function: Any = linear) -> list[Tensor]:
    """Result and gradients of a map of float32 under autocast."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((rows, 24), (40, 24), (rows, 40)))
    given = [x.requires_grad_(), weight.requires_grad_(), *([torch.ones(40, requires_grad=True)] if bias else [])]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out = function(*given)
    return [out, *torch.autograd.grad(out, given, grad.to(out.dtype))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS - 1, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_map_is_that_of_pytorch(dtype: torch.dtype, rows: int, bias: bool) -> None:
    ours, theirs = passes(rows, dtype, bias), passes(rows, dtype, bias, F.linear)
    exact = passes(rows, torch.float32, bias, F.linear)
    for one, other, truth in zip(ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if dtype == torch.float32:
            assert torch.equal(one, other)
            continue
        tolerance = torch.finfo(dtype).eps * float(truth.detach().abs().max()) * 2
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=tolerance)
        torch.testing.assert_close(one.float(), truth, rtol=0, atol=tolerance)


def test_many_numbers_of_rows_make_few_shapes() -> None:
    with Shapes() as shapes:
        for rows in range(ROWS, 5 * ROWS):
            passes(rows, torch.bfloat16, True)
    sizes = {size for shape in shapes.found for size in shape}
    assert sizes == {24, 40, *(count * ROWS for count in range(1, 5))}


def test_in_full_precision_rows_stay_as_they_are() -> None:
    with Shapes() as shapes:
        passes(ROWS + 1, torch.float32, False)
    assert (ROWS + 1, 24) in shapes.found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [7, 130])
def test_attention_is_that_of_pytorch_with_better_gradients(length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v, grad = (torch.randn(2, length, 3, 16, generator=generator).transpose(1, 2).to(dtype) for _ in range(4))
    inputs = [each.requires_grad_() for each in (q, k, v)]
    ours, theirs = _HalfOnCPU.apply(*inputs), F.scaled_dot_product_attention(*inputs)
    exact_inputs = [each.detach().float().requires_grad_() for each in inputs]
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*exact_inputs), exact_inputs, grad.float())
    assert torch.equal(ours, theirs)

    def error(out: Tensor) -> float:
        found = torch.autograd.grad(out, inputs, grad)
        return sum(float((one.float() - other).abs().sum()) for one, other in zip(found, exact, strict=True))

    assert error(ours) < 0.9 * error(theirs)
