"""Triton's kernels compute the formulas of `ops`: on a GPU, and with Triton's interpreter on the host."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.model import ops
from mmldlm.model.activation_checkpoint import MemoryConfig
from mmldlm.model.compile import Region
from mmldlm.model.layers import rotary_angles
from mmldlm.model.mmdit import Precision
from tests.helpers.noised_batch import noised_batch
from tests.helpers.paths import ROOT
from tests.helpers.small_model import random_inputs, small_model

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(37, 70, 3, 16), (5, 0, 2, 64), (1, 70, 2, 24), (6, 9, 1, 256)]  # latents, tokens, heads, channels of a head


def loaded(device: str) -> Any:
    """Return the kernels, on the host under Triton's interpreter."""
    if device == "cpu":
        kernels = import_module("mmldlm.model.gpu_kernels")
        kernels.wrap_triton = lambda kernel: kernel  # type: ignore[attr-defined]
    ops.load_gpu_kernels(torch.device(device))
    return ops._gpu_kernels[device]


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float(((ours - exact).norm() / exact.norm().clamp_min(1e-9)).detach())


def errors_of_heads(device: str, dtype: torch.dtype, compiled: bool = False) -> list[float]:
    """Return the relative errors of q, k, v in the joint rows and of the gradients against the formula in float64."""
    kernels, errors = loaded(device), []
    function = torch.compile(lambda *args: kernels.JointHeads.apply(*args)) if compiled else kernels.JointHeads.apply
    for latents, rows, count, width in SHAPES:
        latent, text = (torch.randn(count_, 3, count, width, device=device).to(dtype) for count_ in (latents, rows))
        leaves = [latent, text, *(0.5 + torch.rand(4, width, device=device))]
        order = torch.randperm(latents + rows, device=device)
        grads = [torch.randn(len(order), count, width, device=device).to(dtype) for _ in range(3)]
        rotary, leaves = (
            rotary_angles(torch.arange(rows, device=device), width, 1e4),
            [x.requires_grad_() for x in leaves],
        )
        ours = function(*leaves, *rotary, order.argsort())
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        formula = ops.normalize_heads.__wrapped__  # type: ignore[attr-defined]
        angles = (rotary[0].double(), rotary[1].double())
        streams = formula(exact[0], torch.stack(exact[2:4]), None), formula(exact[1], torch.stack(exact[4:]), angles)
        joint = torch.cat(streams)[order].unbind(1)
        results = [*ours, *torch.autograd.grad(ours, leaves, grads)]
        results64 = [*joint, *torch.autograd.grad(joint, exact, [grad.double() for grad in grads])]
        errors += [relative_error(a, b) for a, b in zip(results, results64, strict=True)]
    return errors


def errors_of_norms(device: str, dtype: torch.dtype, compiled: bool = False) -> list[float]:
    """As `errors_of_heads`, of the gated addition and modulated norm; samples of no rows and of several tiles."""
    loaded(device)
    function, errors = torch.compile(ops.modulated) if compiled else ops.modulated, []
    for lengths, has_branch in itertools.product(([1, 0, 16, 17, 65, 5, 0], [3] * 5, [0, 0], None), (True, False)):
        samples, width = len(lengths or range(6)), 70
        ids = (
            torch.arange(samples) if lengths is None else torch.arange(samples).repeat_interleave(Tensor(lengths).int())
        )
        x, branch, y_grad, out_grad = (torch.randn(len(ids), width, device=device) for _ in range(4))
        modulation = torch.randn(samples, 4 * width, device=device)[:, width:]
        inputs = [x, modulation[:, width:].to(dtype), branch.to(dtype), modulation[:, :width].to(dtype)]
        leaves = [tensor.requires_grad_() for tensor in inputs[: 4 if has_branch else 2]]
        with ops.assume_device("cuda"):
            rows = None if lengths is None else ops.SampleRows.of(ids.to(device), samples)
            y, out = function(ops.Stream(leaves[0], *leaves[2:]), leaves[1], rows, dtype)
            results = [y, out, *torch.autograd.grad([y, out], leaves, [y_grad, out_grad.to(dtype)])]
        exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
        shift, scale = exact[1][ids].chunk(2, 1)
        y = exact[0] + (exact[3][ids] * exact[2] if has_branch else 0)
        out = F.layer_norm(y, (width,), eps=ops.EPSILON) * (1 + scale) + shift
        results64 = [y, out, *torch.autograd.grad([y, out], exact, [y_grad.double(), out_grad.to(dtype).double()])]
        errors += [relative_error(a, b) for a, b in zip(results, results64, strict=True)]
    return errors


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_heads(device: str, dtype: torch.dtype, limit: float, compiled: bool) -> None:
    assert max(errors_of_heads(device, dtype, compiled)) < limit


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])
def test_norms(device: str, dtype: torch.dtype, limit: float, compiled: bool) -> None:
    assert max(errors_of_norms(device, dtype, compiled)) < limit


@pytest.fixture
def mm_on_cpu() -> Iterator[None]:
    """The product of half-precision matrices in float32, which PyTorch has on GPUs alone, on a CPU as well."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=gpu)])
def test_weight_gradients_of_half_precision_products_are_not_rounded(
    device: str, compiled: bool, mm_on_cpu: None
) -> None:
    x, weight, grad = (torch.randn(*size, device=device) for size in ((512, 24), (16, 24), (512, 16)))
    x, grad, weight = x.bfloat16().requires_grad_(), grad.bfloat16(), weight.requires_grad_()
    linear = ops._HalfPrecisionLinear.apply if device == "cpu" else ops.linear
    function = torch.compile(lambda *args: linear(*args), backend="aot_eager") if compiled else linear
    with torch.autocast(device, torch.bfloat16):
        out, plain = function(x, weight), F.linear(x, weight)
    assert torch.equal(out, plain)
    grads, rounded = (torch.autograd.grad(y, (x, weight), grad) for y in (out, plain))
    assert torch.equal(grads[0], rounded[0])
    exact = grad.double().T @ x.detach().double()
    assert relative_error(grads[1], exact) < 1e-6 < 1e-4 < relative_error(rounded[1], exact)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has GPUs")
def test_formulas_are_used_where_triton_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    ops.load_gpu_kernels.cache_clear()
    for _ in range(2):
        ops.load_gpu_kernels(torch.device("cpu"))
    assert not ops._gpu_kernels
    (message,) = caplog.messages
    assert message.startswith("Triton does not run here (")


def errors_of_network(memory: MemoryConfig, latent_tokens: int, precision: Precision) -> list[float]:
    """Return the relative errors of loss and gradients by kernels, in the interpreter, against those by formulas."""
    results = []
    for device in ("cpu", "cuda"):
        if device == "cuda":
            loaded("cpu")
        model = small_model(latent_tokens, "math", memory=memory, precision=precision).train()
        objective, noised = noised_batch("joint", latent_tokens, (1, 16, 3))
        with ops.assume_device(device):
            loss, _ = objective(model, noised, noised.counts.tolist())
            loss.backward()
        results.append([loss, *(part.grad for part in model.parameters())])
    return [relative_error(ours, exact) for exact, ours in zip(*results, strict=True)]


def compiled_bytes() -> list[int]:
    """Return the sizes of all kernels, compiled for an H100 without one; those of norms with and without tiles."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernels, sizes = import_module("mmldlm.model.gpu_kernels"), []
    float32 = ("gate", "shift_scale", "x", "y", "y_grad", "x_grad", "sums", "cos", "sin", "weight_grads")
    float32 += ("latent_q", "latent_k", "text_q", "text_k")
    types = dict.fromkeys(float32, "*fp32") | dict.fromkeys(("inverse", "offsets", "tiles"), "*i64")
    types |= dict.fromkeys(("gate_stride", "mod_stride", "num_rows", "num_latents"), "i32") | {"epsilon": "fp32"}
    norm = {"width": 1152, "block": 2048, "rows_block": 2, "tile_rows": 16}
    heads = {"heads": 4, "width": 64, "block": 32, "pairs": 64}
    no_tiles = norm | {"offsets": None, "tiles": None}
    for name, constants in (("_add_norm{}", norm), ("_add_norm{}", no_tiles), ("_heads{}", heads)):
        for kernel in (getattr(kernels, name.format(way)) for way in ("_kernel", "_backward_kernel")):
            signature = {arg: "constexpr" if arg in constants else types.get(arg, "*bf16") for arg in kernel.arg_names}
            done = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
            sizes.append(len(done.asm["cubin"]))
    return sizes


def graphs_of_a_block() -> int:
    """Return how many graphs the first block becomes for micro-batches of three sizes. Its kernels cannot run here."""
    import triton
    from triton.backends.compiler import GPUTarget

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return lambda *_: 1 / 0

    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    ops._gpu_kernels["cpu"] = import_module("mmldlm.model.gpu_kernels")
    graphs: list[Any] = []
    model = small_model(2, "math").train()
    model.blocks[0].forward = region = Region(model.blocks[0].forward, {})
    region.compiled = torch.compile(region.function, backend=backend, dynamic=False, fullgraph=True)
    for lengths in ((3, 5), (1, 9, 4, 16), (7, 2, 2)):
        with ops.assume_device("cuda"), suppress(ZeroDivisionError):
            random_inputs(lengths, 2).run(model)
    return len(graphs)


def in_new_process(expression: str, **environment: str) -> Any:
    """Return the value of an expression of this module's names in a process with Triton."""
    pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA brings")
    program = f"import json; from tests.model.test_gpu_kernels import *; print(json.dumps({expression}))"
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("errors", ["errors_of_heads", "errors_of_norms"])
def test_on_the_host(errors: str) -> None:
    exact, rounded = in_new_process(
        f"[max({errors}('cpu', dtype)) for dtype in (torch.float32, torch.bfloat16)]", TRITON_INTERPRET="1"
    )
    assert exact < 1e-6 and rounded < 4e-3


def test_a_network_on_the_host() -> None:
    """Blocks that leave their last addition to the next one, and blocks that are recomputed and do not."""
    cases = [("none", 3, "fp32"), ("full", 1, "fp32"), ("selective", 3, "bf16")]
    expression = f"[max(errors_of_network(MemoryConfig(kind), *case)) for kind, *case in {cases}]"
    *exact, rounded = in_new_process(expression, TRITON_INTERPRET="1")
    assert max(exact) < 1e-5 and rounded < 0.1


def test_kernels_compile_for_a_gpu() -> None:
    assert min(in_new_process("compiled_bytes()")) > 1000


def test_micro_batches_of_other_sizes_are_not_compiled_again() -> None:
    assert in_new_process("graphs_of_a_block()") == 1
