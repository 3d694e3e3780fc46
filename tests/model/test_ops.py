"""Autograd functions: their results, gradients and saved tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.model.layers import rotary_angles
from mmldlm.model.ops import (
    SampleRows,
    Stream,
    _row_chunks,
    add_gated,
    assume_device,
    gather_rows,
    modulated,
    modulated_linear,
    normalize_heads,
    swiglu_linear,
)

pytestmark = pytest.mark.quick

ROWS = torch.tensor([0, 0, 0, 1, 2, 2, 2])
SAMPLES, WIDTH, HEADS = 3, 8, 2


devices = pytest.mark.parametrize("device", ["cpu", "cuda"])


def sample_rows() -> SampleRows:
    return SampleRows.of(ROWS, SAMPLES)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def both(shift: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([shift, scale], dim=-1)


def plain_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def plain_added_and_modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.cat([x, plain_modulate(x, shift, scale)], 1)


def plain_heads(qkv: Tensor, weight: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    q, k, v = qkv.unbind(1)
    parts = [F.rms_norm(part, part.shape[-1:], scale, eps=1e-6) for part, scale in zip((q, k), weight, strict=True)]
    if rotary is not None:
        turn = torch.complex(*rotary)[:, None]
        for index, part in enumerate(parts):
            turned = torch.complex(*(half.contiguous() for half in part.chunk(2, -1))) * turn
            parts[index] = torch.cat([turned.real, turned.imag], -1)
    return torch.stack([*parts, v], 1)


ROTARY = rotary_angles(torch.arange(len(ROWS)), WIDTH, 100.0)
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
CASES: dict[str, Case] = {
    "modulated linear": (
        lambda x, shift, scale, *linear: modulated_linear(Stream(x), both(shift, scale), sample_rows(), *linear)[1],
        lambda x, shift, scale, weight, bias: F.linear(plain_modulate(x, shift[ROWS], scale[ROWS]), weight, bias),
        [
            draw(len(ROWS), WIDTH),
            draw(SAMPLES, WIDTH),
            draw(SAMPLES, WIDTH, seed=1),
            draw(WIDTH + 3, WIDTH),
            draw(WIDTH + 3),
        ],
    ),
    "modulated linear, rows are samples": (
        lambda x, shift, scale, weight: modulated_linear(Stream(x), both(shift, scale), None, weight, None)[1],
        lambda x, shift, scale, weight: F.linear(plain_modulate(x, shift, scale), weight),
        [draw(SAMPLES, WIDTH), draw(SAMPLES, WIDTH, seed=1), draw(SAMPLES, WIDTH, seed=2), draw(WIDTH + 3, WIDTH)],
    ),
    "add_gated": (
        lambda x, gate, branch: add_gated(x, gate, branch, sample_rows()),
        lambda x, gate, branch: x + gate[ROWS] * branch,
        [draw(len(ROWS), WIDTH), draw(SAMPLES, WIDTH), draw(len(ROWS), WIDTH, seed=1)],
    ),
    "add_gated, rows are samples": (
        lambda x, gate, branch: add_gated(x, gate, branch, None),
        lambda x, gate, branch: x + gate * branch,
        [draw(SAMPLES, WIDTH), draw(SAMPLES, WIDTH, seed=1), draw(SAMPLES, WIDTH, seed=2)],
    ),
    "modulated": (
        lambda x, shift, scale: modulated(Stream(x), both(shift, scale), sample_rows())[1],
        lambda x, shift, scale: plain_modulate(x, shift[ROWS], scale[ROWS]),
        [draw(len(ROWS), WIDTH), draw(SAMPLES, WIDTH), draw(SAMPLES, WIDTH, seed=1)],
    ),
    "add_gated, modulated": (
        lambda x, gate, branch, *mod: torch.cat(modulated(Stream(x, branch, gate), both(*mod), sample_rows()), 1),
        lambda x, gate, branch, *mod: plain_added_and_modulated(x + gate[ROWS] * branch, *(part[ROWS] for part in mod)),
        [draw(len(ROWS), WIDTH), draw(SAMPLES, WIDTH), draw(len(ROWS), WIDTH, seed=1)]
        + [draw(SAMPLES, WIDTH, seed=seed) for seed in (2, 3)],
    ),
    "add_gated, modulated, rows are samples": (
        lambda x, gate, branch, *mod: torch.cat(modulated(Stream(x, branch, gate), both(*mod), None), 1),
        lambda x, gate, branch, *mod: plain_added_and_modulated(x + gate * branch, *mod),
        [draw(SAMPLES, WIDTH, seed=seed) for seed in range(5)],
    ),
    "swiglu, linear": (
        swiglu_linear,
        lambda hidden, weight: F.linear(F.silu(hidden.chunk(2, -1)[0]) * hidden.chunk(2, -1)[1], weight),
        [draw(len(ROWS), 2 * WIDTH), draw(WIDTH + 3, WIDTH)],
    ),
    "heads, turned": (
        lambda qkv, weight: normalize_heads(qkv, weight, ROTARY),
        lambda qkv, weight: plain_heads(qkv, weight, ROTARY),
        [draw(len(ROWS), 3, HEADS, WIDTH), draw(2, WIDTH)],
    ),
    "heads": (
        lambda qkv, weight: normalize_heads(qkv, weight, None),
        lambda qkv, weight: plain_heads(qkv, weight, None),
        [draw(len(ROWS), 3, HEADS, WIDTH), draw(2, WIDTH)],
    ),
}


def values_and_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [value.clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    weights = draw(*out.shape, seed=9).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@devices
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_formula_and_its_gradient(case: str, device: str) -> None:
    fused, plain, inputs = CASES[case]
    with assume_device(device):
        result, expected = values_and_gradients(fused, inputs), values_and_gradients(plain, inputs)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_row_chunks_give_the_same_result(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _, inputs = CASES[case]
    whole = values_and_gradients(fused, inputs)
    two_rows = 2 * inputs[0][0].numel() // torch.get_num_threads()
    monkeypatch.setattr("mmldlm.model.ops.CHUNK_NUMEL", two_rows)
    assert len(list(_row_chunks(inputs[0]))) == (len(inputs[0]) + 1) // 2
    for one, other in zip(values_and_gradients(fused, inputs), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    with assume_device("cuda"):
        assert list(_row_chunks(inputs[0])) == [(inputs[0],)]


@devices
@pytest.mark.parametrize("lengths", [(1,), (3, 1, 4), (32, 64, 1), (0, 200, 0, 0, 45, 0)])
def test_sums_by_sample(lengths: tuple[int, ...], device: str) -> None:
    """The gradient of a gather, with samples of a row, of many, and without rows; exact, to show every row once."""
    index, table = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)), draw(len(lengths), WIDTH)
    values = torch.randint(-100, 100, (len(index), WIDTH), generator=torch.Generator().manual_seed(0)).float()
    with assume_device(device):
        rows = SampleRows.of(index, len(lengths))
        assert (rows.offsets is None) == (device == "cpu")
        odd = torch.arange(1, len(index), 2)
        for chosen, chosen_rows in ((torch.arange(len(index)), rows), (odd, SampleRows.of(index[odd], len(lengths)))):
            leaf = table.clone().requires_grad_()
            gathered = gather_rows(leaf, chosen_rows)
            assert torch.equal(gathered, table[index[chosen]])
            (gradient,) = torch.autograd.grad(gathered, leaf, values[chosen])
            parts = values[chosen].split(torch.bincount(index[chosen], minlength=len(lengths)).tolist())
            assert torch.equal(gradient, torch.stack([part.sum(0) for part in parts]))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_elementwise_operations_run_in_float32(case: str) -> None:
    fused, plain, inputs = CASES[case]
    low = [value.bfloat16() for value in inputs]
    if case.startswith("heads"):
        low[1] = inputs[1]  # the scales of the heads are float32 parameters
    if case.startswith("add_gated"):
        low[0] = inputs[0]  # and so is the stream
    with torch.autocast("cpu", torch.bfloat16):  # products take bfloat16, as in training
        result = values_and_gradients(fused, low)
    expected = values_and_gradients(plain, [value.float() for value in low])
    for one, other in zip(result, expected, strict=True):
        assert (one.float() - other).norm() <= 8e-3 * other.norm()
    for one, given in zip(result[1:], low, strict=True):
        assert one.dtype == given.dtype


@pytest.mark.parametrize(
    ("case", "kept"),
    [("modulated linear", 1), ("add_gated", 1), ("swiglu, linear", 2), ("heads, turned", 3 * HEADS)],
)
def test_only_inputs_are_saved_for_backward(case: str, kept: int) -> None:
    """Units are tensors [T, width]; tensors with a row per sample, position or head are negligible."""
    fused, _, inputs = CASES[case]
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if len(tensor) == len(ROWS):
            sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(*[value.clone().requires_grad_() for value in inputs])
    large = [size for size in sizes if size >= len(ROWS) * WIDTH]
    assert sum(large) == kept * len(ROWS) * WIDTH
