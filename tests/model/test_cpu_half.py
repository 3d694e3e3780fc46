"""Half precision on a CPU: products in few shapes, by rows that change nothing; attention's gradients in float32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.batch import PackedLayout
from mmldlm.model.attention import _grouped_sdpa, joint_attention
from mmldlm.model.cpu_half import ROW_MULTIPLE, RowPaddedLayout, pad_rows, slowdown
from mmldlm.model.heads import ACCURACY_STRIDE
from mmldlm.model.mmdit import MMDiT, Precision
from tests.helpers.small_model import VOCAB, Inputs, random_inputs, small_model

pytestmark = pytest.mark.quick

HALF = pytest.mark.parametrize("precision", ["bf16", "fp16"])


class Rows(TorchDispatchMode):
    """How many rows and columns the operands of matrix products have, and all sizes of those in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.in_half: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            result = {size for each in args if each.dim() == 2 for size in each.shape}
            self.found |= result
            self.in_half |= result if args[-1].dtype != torch.float32 else set()
        return func(*args, **(kwargs or {}))


def step(model: MMDiT, inputs: Inputs, predicted: int) -> list[Tensor]:
    """Predictions, and the gradients of all parameters by weighted sums of them."""
    model.zero_grad()
    positions = torch.arange(len(inputs.tokens))[:predicted]
    targets = torch.arange(predicted) % (VOCAB - 2)
    result = model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, inputs.layout, positions, targets)
    assert result.text.shape == (predicted,)
    generator = torch.Generator().manual_seed(2)
    outputs = [result.text, result.latent, result.length_logits]
    sum((each * torch.randn(each.shape, generator=generator)).sum() for each in outputs).backward()  # type: ignore[union-attr]
    return [each.detach() for each in outputs] + [p.grad.clone() for p in model.parameters() if p.grad is not None]


@HALF
def test_many_numbers_of_rows_make_few_shapes(precision: Precision) -> None:
    model = small_model(precision=precision)
    with Rows() as first:
        step(model, random_inputs((7, 12, 12)), 5)
    with Rows() as all_rows:
        for length in range(1, 17):
            step(model, random_inputs((length, 16, 9)), length)
    assert all_rows.found == first.found
    with Rows() as more:
        step(model, random_inputs((16,) * 8), 2 * ROW_MULTIPLE - 1)
    assert more.in_half - first.in_half == {2 * ROW_MULTIPLE}


@HALF
def test_padding_rows_are_no_tokens_that_could_be_right(precision: Precision) -> None:
    model, inputs, predicted = small_model(precision=precision), random_inputs((16,) * 8), 2 * ACCURACY_STRIDE + 1
    positions, targets = torch.arange(predicted), torch.arange(predicted) % (VOCAB - 2)
    result = model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, inputs.layout, positions, targets)
    assert result.is_best is not None and result.is_best.shape == (3,)


@HALF
def test_products_of_few_rows_stay_in_float32(precision: Precision) -> None:
    samples, latent_tokens = 5, 3
    model = small_model(latent_tokens, precision=precision, width=48)
    with Rows() as rows:
        step(model, random_inputs((7,) * samples, latent_tokens), 9)
    assert {samples, samples * latent_tokens} <= rows.found
    assert ROW_MULTIPLE in rows.in_half and not {samples, samples * latent_tokens} & rows.in_half
    with Rows() as rows:
        step(model, random_inputs((1,) * 30, latent_tokens), 9)
    assert 30 * latent_tokens in rows.in_half, "more rows than it pays for"


def test_in_full_precision_rows_stay_as_they_are() -> None:
    with Rows() as rows:
        step(small_model(), random_inputs((7, 12, 12)), 5)
    assert {31, 5} <= rows.found and ROW_MULTIPLE not in rows.found


@HALF
@pytest.mark.parametrize("predicted", [0, 1, 31, ROW_MULTIPLE])
def test_padding_rows_change_nothing(precision: Precision, predicted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the order of sums, the result is the same without them, and that of float32."""
    lengths, latent_tokens = (16, 16, 16, 7, 12, 12), 2
    inputs = random_inputs(lengths, latent_tokens)
    model = small_model(latent_tokens, precision=precision)
    result = step(model, inputs, predicted)
    monkeypatch.setattr("mmldlm.model.cpu_half.ROW_MULTIPLE", 1)
    without = step(model, inputs, predicted)
    exact = step(small_model(latent_tokens), inputs, predicted)
    for one, other, truth in zip(result, without, exact, strict=True):
        assert one.shape == truth.shape
        assert (one - other).norm() <= 0.03 * truth.norm()
        assert (one - truth).norm() <= 0.1 * truth.norm()


def test_values_of_padding_rows() -> None:
    assert pad_rows(torch.ones(3)).tolist() == [1.0] * 3 + [0.0] * (ROW_MULTIPLE - 3)
    assert len(pad_rows(torch.ones(0))) == 0 and len(pad_rows(torch.ones(ROW_MULTIPLE))) == ROW_MULTIPLE
    layout = RowPaddedLayout((3, 2), 1)
    assert layout.num_tokens == 5
    assert layout.sample_of_token.tolist() == [0, 0, 0] + [1] * (ROW_MULTIPLE - 3)
    assert layout.position.tolist() == [0, 1, 2, 0, 1] + [0] * (ROW_MULTIPLE - 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(7,), (130, 130), (1, 1, 20, 5, 5)], ids=str)
def test_attention_is_that_of_pytorch_with_better_gradients(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    generator, latent_tokens = torch.Generator().manual_seed(sum(lengths)), 3
    layout, heads = RowPaddedLayout(lengths, latent_tokens), (2, 16)

    def draw(rows: int, *of_row: int) -> Tensor:
        return torch.randn(rows, *of_row, *heads, generator=generator).to(dtype)

    latents, texts = draw(len(lengths) * latent_tokens, 3), draw(ROW_MULTIPLE * (-(-sum(lengths) // ROW_MULTIPLE)), 3)
    grads = [draw(len(latents)), draw(len(texts))]
    tokens = layout.num_tokens

    def run(function: Any, layout: PackedLayout, rows: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [each.to(dtype).requires_grad_() for each in (latents, texts[:rows])]
        outs = function(*inputs, layout)
        return outs, list(torch.autograd.grad(outs, inputs, [grads[0].to(dtype), grads[1][:rows].to(dtype)]))

    ours, our_grads = run(lambda *given: joint_attention(*given, "cpu_half"), layout, len(texts), dtype)
    plain = PackedLayout(lengths, latent_tokens)
    theirs, their_grads = run(_grouped_sdpa, plain, tokens, dtype)
    _, exact = run(_grouped_sdpa, plain, tokens, torch.float32)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1][:tokens], theirs[1])
    assert not ours[1][tokens:].any() and not our_grads[1][tokens:].any()

    def error(result: list[Tensor]) -> float:
        pairs = zip((result[0], result[1][:tokens]), exact, strict=True)
        return sum(float((one.float() - truth).abs().sum()) for one, truth in pairs)

    assert error(our_grads) < 0.9 * error(their_grads)


def test_a_precision_without_instructions_is_measured_as_slow() -> None:
    """oneDNN may use none for bfloat16 where it is limited to AVX2."""
    command = "import torch; from mmldlm.trainer.startup_report import precision_notices as notices; "
    command += "print(*notices('bf16', 'cpu')); assert not notices('fp32', 'cpu') + notices('bf16', 'cuda')"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True)
    times = re.search(r"bf16 take (\d+\.\d) times as long", done.stdout)
    assert times and float(times[1]) > 1.2
    assert slowdown(torch.float32) == pytest.approx(1, abs=0.9)
