"""Parts of `scripts/gpu_check.sh graphs` without a training: time the GPU alone by replays, and check the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as impls

from benchmarks.common.task import SHAPES, device, heads_of
from mmldlm.batch import PackedLayout
from mmldlm.model import ops
from mmldlm.model.compile import CompileConfig, compile_regions
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig

Result = dict[str, Any]
NO_GPU: Result = {"left out": "needs a GPU"}


def captured(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Capture the GPU work of `work` in a graph, after three calls to warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Return the GPU time (ms) of a call. On a CPU, time a single call, just to show that it works."""
    if device().type != "cuda":
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    graph, (start, end) = captured(work), (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def flash(lengths: Sequence[int]) -> tuple[Tensor, Callable[[], Tensor], Callable[[], list[Tensor]]]:
    """Return sample offsets for these rows, and functions for attention (16 heads of 64) without and with gradients."""
    from torch.nn.attention.varlen import varlen_attn

    make, offsets, longest = torch.Generator("cuda").manual_seed(0), offsets_of(lengths), max(lengths)
    q, k, v, grad = torch.randn(4, sum(lengths), 16, 64, generator=make, device="cuda", dtype=torch.bfloat16)
    q, k, v = (part.clone().requires_grad_() for part in (q, k, v))

    def forward() -> Any:
        return varlen_attn(q, k, v, offsets, offsets, longest, longest)

    def both() -> list[Tensor]:
        out = forward()
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]

    return offsets, forward, both


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)


def largest_difference(values: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest of the tensors' relative differences, or 9 if one is not finite."""
    differences = ((a.float() - b.float()).norm() / b.float().norm() for a, b in zip(values, others, strict=True))
    return max(float(each.nan_to_num(9.0)) for each in differences)


def attention(_: Any) -> Result:
    """Time attention alone, by rows of a sample (e.g. 511 tokens and a latent) and installed kernel."""
    if device().type != "cuda":
        return NO_GPU
    table: Result = {}
    for length in (512, 513, 128, 129, 2048):
        _, forward, both = flash([length] * (16_384 // length))
        values = both()
        for name in ("FA2", *impls.list_flash_attention_impls()):
            try:
                if name != "FA2":
                    impls.activate_flash_attention_impl(name)
                row = {"difference": largest_difference(both(), values), "forward_ms": milliseconds(forward)}
                table[f"{name}, {length} rows"] = {**row, "both_ms": milliseconds(both)}
            except Exception as error:  # the kernel is not installed, or not for this GPU
                table[name] = f"{type(error).__name__}: {error}"[:300]
            finally:
                if name != "FA2":
                    impls.restore_flash_attention_impl()
    return table


def replay(_: Any) -> Result:
    """Check that captured attention follows offsets that change after the capture, also for samples without rows."""
    if device().type != "cuda":
        return NO_GPU
    (offsets, _forward, both), outputs, table = flash([512] * 32), list[Tensor](), Result()
    graph = captured(lambda: outputs.__setitem__(slice(None), both()))
    for name, lengths in {
        "as captured": [512] * 32,
        "other lengths": [511, 1, 300, 212, *[512] * 28],
        "without rows": [512, 0, 0, 512, *[500] * 24, 12, 0, 512, 512],
        "last ones without rows": [*[512] * 20, *[0] * 12],
    }.items():
        offsets.copy_(offsets_of(lengths))
        graph.replay()
        results = [part.clone() for part in outputs], both()
        # Rows beyond the last offset belong to no sample and are not written.
        table[name] = largest_difference(*([part[: sum(lengths)] for part in result] for result in results))
    return table | {"largest_difference": max(table.values())}


def blocks(options: Any) -> Result:
    """Time a block, and everything outside of the blocks, forward and backward, from networks of two depths."""
    shape, on = SHAPES["tiny" if options.tiny else "gpu"], device()
    samples, length, is_gpu, table = 2 if options.tiny else 32, shape.positions - 1, on.type == "cuda", Result()
    tokens, latents = torch.zeros(samples * length).long().to(on), torch.randn(samples, 1, 64).to(on)
    times, layout = torch.rand(samples).to(on), PackedLayout((length,) * samples, 1, on)
    positions = torch.arange(0, len(tokens), 2).to(on)  # any tokens will do as targets

    def step_ms(depth: int, compiled: bool) -> float:
        sizes = DataShape(shape.vocab_size, 1, 0, length, 1, 64)
        config = ModelConfig(depth, shape.width, num_heads=heads_of(shape.width))
        with on:
            model = MMDiT(config, sizes, "varlen" if is_gpu else "math", precision="bf16" if is_gpu else "fp32")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        compile_regions(model, CompileConfig("regional" if compiled else "none"), on)

        def work() -> None:
            out = model(tokens, latents, times, times, layout, positions, positions)
            loss = out.text.sum() + out.latent.sum() + out.length_logits.sum()
            torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)

        return milliseconds(work)

    if is_gpu:
        ops.load_gpu_kernels(latents.device)
    own: Any = ops._gpu_kernels
    for name, compiled, kernels in (
        ("compiled", True, own),
        ("without own kernels", True, {}),
        ("eager", False, own),
    ):
        ops._gpu_kernels = kernels
        torch.compiler.reset()
        few, many = (step_ms(depth, compiled and is_gpu) for depth in (2, 6))
        table[name] = {"block_ms": (many - few) / 4, "outside_ms": few - (many - few) / 2}
    ops._gpu_kernels = own
    return table
