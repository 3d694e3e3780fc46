"""Triton's kernels compute the formulas of `ops`: on a GPU, and with Triton's interpreter on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from mmldlm.model import ops
from mmldlm.model.layers import rotary_angles
from tests.helpers.paths import ROOT

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(37, 3, 16), (5, 2, 64), (70, 2, 24), (1, 1, 256)]  # rows, heads, channels of a head


def loaded(device: str) -> Any:
    """Return the kernels, on the host under Triton's interpreter."""
    if device == "cuda":
        ops.load_gpu_kernels(torch.device(device))
        assert ops._gpu_kernels is not None
        return ops._gpu_kernels
    kernels = import_module("mmldlm.model.gpu_kernels")
    kernels.wrap_triton = lambda kernel: kernel  # type: ignore[attr-defined]
    return kernels


def heads(function: Callable[..., Tensor], inputs: list[Tensor], rotary: Any, grad: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves, rotary)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def errors_of_heads(device: str, dtype: torch.dtype, compiled: bool = False) -> list[float]:
    """Return the largest relative errors of result and gradients against the formula in float64."""
    kernels = loaded(device)
    function = torch.compile(ops.normalize_heads) if compiled else ops.normalize_heads
    if device == "cpu":  # as with tensors on a GPU

        def function(qkv: Tensor, weight: Tensor, rotary: Any) -> Tensor:
            return kernels.NormalizeHeads.apply(qkv, weight, *(rotary or (None, None)), ops.EPSILON)

    errors = []
    for rows, count, width in SHAPES:
        for rotary in (rotary_angles(torch.arange(rows, device=device), width, 1e4), None):
            qkv, grad = (torch.randn(rows, 3, count, width, device=device).to(dtype) for _ in range(2))
            weight = 0.5 + torch.rand(2, width, device=device)
            angles = None if rotary is None else tuple(angle.double() for angle in rotary)
            exact = heads(ops._normalize_heads.__wrapped__, [qkv.double(), weight.double()], angles, grad)  # type: ignore[attr-defined]
            ours = heads(function, [qkv, weight], rotary, grad)
            errors += [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]
    return errors


def errors_of_sums(device: str, dtype: torch.dtype) -> list[float]:
    kernels, errors = loaded(device), []
    for lengths in ([1], [3, 0, 47, 50], [0, 200, 0, 45, 0]):
        values = torch.randn(sum(lengths), 70, device=device).to(dtype)
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        expected = torch.stack([part.double().sum(0) for part in values.split(lengths)])
        errors.append(float((kernels.sample_sums(values, offsets) - expected).norm() / expected.norm()))
    return errors


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_heads(device: str, dtype: torch.dtype, limit: float, compiled: bool) -> None:
    assert max(errors_of_heads(device, dtype, compiled)) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_sums(device: str, dtype: torch.dtype) -> None:
    assert max(errors_of_sums(device, dtype)) < 1e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_formulas_are_used_where_triton_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    ops.load_gpu_kernels.cache_clear()
    for _ in range(2):
        ops.load_gpu_kernels(torch.device("cpu"))
    assert ops._gpu_kernels is None
    (message,) = caplog.messages
    assert message.startswith("Triton does not run here (")


def test_on_the_host() -> None:
    pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA brings")
    program = (
        "import torch; from tests.model.test_gpu_kernels import errors_of_heads, errors_of_sums\n"
        "print(max(errors_of_heads('cpu', torch.float32) + errors_of_sums('cpu', torch.float32)))"
    )
    command, env = [sys.executable, "-c", program], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-6
