"""The kernels of compiled regions on an H200, planned by Inductor on a machine without a GPU.

    python -m tests.helpers.kernel_plan FUNCTION ...

Runs forward and backward of three blocks of 1024 on fake tensors, in bf16 with 32 samples of 512 tokens, operators of a
GPU and the package's Triton kernels. The graphs of each region are moved to a fake GPU, and Inductor fuses them, but
compiles nothing. Prints a line of JSON for each FUNCTION: the kernels of each region that is compiled for it, in the
order in which they are entered. It replaces functions of PyTorch, so it is a process of its own, with a fork for each
FUNCTION.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.device_interface import get_interface_for_device
from torch._dynamo.variables import ConstantVariable, TensorVariable
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import post_grad, reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmldlm.batch import PackedLayout
from mmldlm.model import ops
from mmldlm.model.compile import CompileConfig, compile_regions
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig

SAMPLES, LENGTH, WIDTH, CHANNELS, VOCAB = 32, 512, 1024, 64, 30_522
GPU = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip
Graph = tuple[GraphModule, list[Any], bool]  # with its inputs, and whether it is of the backward pass


def pretend() -> None:
    """Let PyTorch and Triton see an H200, and traced code tensors on it."""
    driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    gpu, both = get_interface_for_device("cuda"), {"get_device_properties": H200, "current_device": 0}
    for owner, values in (
        (torch.cuda, {"get_device_capability": (9, 0), "device_count": 1, "is_bf16_supported": True}),
        (gpu, {"get_compute_capability": 90, "is_available": True, "is_bf16_supported": True}),
        (gpu.Worker, {}),
    ):
        for name, value in (both | values).items():
            setattr(owner, name, staticmethod(lambda *_, value=value, **__: value))
    TensorVariable.method_attr_is_cuda = lambda *_: ConstantVariable.create(True)
    torch._dynamo.maybe_mark_dynamic = lambda *_: None  # a plan is of one size
    reinplace.canonicalize_view_scatter_ops = lambda *_: None  # it copies on the device
    ops._gpu_kernels["cpu"] = import_module("mmldlm.model.gpu_kernels")  # on which the graphs are traced


def trace(function_name: str) -> list[list[Graph]]:
    """Return the graphs of each region of a function."""
    regions: list[list[Graph]] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        regions.append([])
        return compile_fx(gm, inputs, inner_compile=partial(record, regions[-1]))

    def record(graphs: list[Graph], gm: GraphModule, inputs: Any, is_backward: bool = False, **_: Any) -> Any:
        graphs.append((copy.deepcopy(gm), inputs, is_backward))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile_whole(function: Any, compile: Any = torch.compile, options: Any = None, **_: Any) -> Any:
        is_asked = function.__qualname__ == function_name
        if is_asked:
            for name, value in options.items():
                setattr(torch._inductor.config, name, value)
        return compile(function, fullgraph=True, dynamic=False, backend=backend if is_asked else "eager")

    torch.compile = compile_whole
    with FakeTensorMode(), ops.assume_device("cuda"):
        config, shape = ModelConfig(3, WIDTH, num_heads=WIDTH // 64), DataShape(VOCAB, 1, 0, LENGTH, 1, CHANNELS)
        model = MMDiT(config, shape, "varlen", precision="bf16")
        assert compile_regions(model, CompileConfig("regional"), torch.device("cpu")).startswith("regional")
        tokens, positions = torch.zeros(SAMPLES * LENGTH).long(), torch.arange(0, SAMPLES * LENGTH, 2)
        layout, times = PackedLayout((LENGTH,) * SAMPLES, 1), torch.rand(SAMPLES)
        out = model(tokens, torch.randn(SAMPLES, 1, CHANNELS), times, times, layout, positions, positions)
        (out.text.sum() + out.latent.sum() + out.length_logits.sum()).backward()
    return regions


def kernels(gm: GraphModule, inputs: list[Any], is_backward: bool) -> list[tuple[str, int]]:
    """Return name and bytes, read and written, of each kernel of a graph if its tensors are on a GPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return GPU if isinstance(value, torch.device) else value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    for each in gm.graph.nodes:
        each.args, each.kwargs = (node.map_aggregate(given, moved) for given in (each.args, each.kwargs))
        if each.op == "get_attr":
            setattr(gm, each.target, moved(getattr(gm, each.target)))
    gm.recompile()
    args = [moved(value) for value in inputs]
    record_original_output_strides(gm)
    with V.set_fake_mode(mode):
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*args)
        post_grad.post_grad_passes(gm, False)
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*args)
        graph = GraphLowering(gm, args, is_backward=is_backward, is_inference=False)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), DebugContext():
            graph.run(*args)
            graph._update_scheduler()
            return [kernel for scheduled in graph.scheduler.nodes if (kernel := _kernel(scheduled))]


def _kernel(scheduled: Any) -> tuple[str, int] | None:
    operation, size = scheduled.node, scheduled.get_read_write_buffers_sizes()
    if type(scheduled).__name__ == "NopKernelSchedulerNode" or type(operation).__name__ == "MultiOutput":
        return None
    if isinstance(operation, UserDefinedTritonKernel):  # Inductor takes what it writes to be read as well
        return operation.get_kernel_and_metadata()[0].__name__, scheduled.get_read_buffer_sizes()
    if type(scheduled).__name__ == "ExternKernelSchedulerNode":
        return getattr(operation, "python_kernel_name", None) or str(operation.op_overload), size
    return "+".join(sorted({str(o.target) for part in scheduled.get_nodes() for o in part.node.origins})), size


if __name__ == "__main__":
    pretend()
    for name in sys.argv[1:]:
        if not os.fork():
            regions = trace(name)
            print(json.dumps([[kernel for graph in graphs for kernel in kernels(*graph)] for graphs in regions]))
            sys.exit()
        assert os.wait()[1] == 0, name
