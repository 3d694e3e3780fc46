"""Roofline of a training step on one H200: its kernels, and the time that they take at the rates that the GPU reaches.

    python -m benchmarks roofline [--out FOLDER]

Needs no GPU. The operators of a step in bf16, forward and backward, are recorded on fake tensors, which have shapes but
no memory, with the attention kernel and the element-wise operations of a GPU. A kernel takes as long as its products or
its traffic, whichever takes longer, and at least a launch. Two predictions follow:

    eager      one kernel for each operator
    fused      whatever runs between two products or attention kernels is one kernel, which reads what enters and writes
               what leaves it: what a perfect compiler would reach

The kernels of a compiled block are those that Inductor plans when it lowers and fuses for Triton.

The rates are constants below: those of products, copies and launches as seen on that GPU, lowered by what kernels of
these shapes usually lose. Time in which the GPU waits for the host is not included. The host's own time is measured on
a network of equal depth with tensors so small that a CPU computes them in no time: what is left is Python, autograd and
the dispatch of the same operators. It is an upper bound, as the little computing is included.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common.report import RESULTS, markdown, plain_parser, print_status, write_json
from benchmarks.common.task import CHANNELS, SHAPES
from benchmarks.gpu_bars import committed, measured_mfu
from mmldlm.batch import PackedLayout
from mmldlm.model.attention import rows_to_attend
from mmldlm.model.flops import ModelFlops, peak_flops
from mmldlm.model.layers import rotary_angles
from mmldlm.model.mmdit import DataShape, MMDiT, MMDiTBlock, ModelConfig, StreamRows
from mmldlm.model.ops import assume_device
from mmldlm.tools.plan.kernels import UPDATE_BYTES, Access, Kernel, Phase, Rates, Recorder
from mmldlm.utils.meta_device import materialize

SIZES = {"24 x 1024": (24, 1024), "12 x 768": (12, 768), "24 x 2048": (24, 2048)}  # blocks, width
HOST_SIZE = "24 x 1024"  # whose step the host's time is compared with
SAMPLES, LENGTH = 32, 512  # 16,384 tokens, half of them masked
VOCABULARY = SHAPES["gpu"].vocab_size
GPU = "NVIDIA H200"
RATES = Rates(
    product=0.80 * 790e12,  # of large bf16 products: what 8,192 x 8,192 x 8,192 reaches, less partial tiles
    attention_forward=330e12,  # of FlashAttention-2 at head width 64
    attention_backward=230e12,
    traffic=0.85 * 4.3e12,  # of a copy's
    launch_s=2.2e-6,
)
SMALL_BYTES = 2**20  # a kernel whose largest tensor is smaller takes about a launch


class _Planned(Exception):
    """Ends a compilation whose kernels have been counted."""


def record(depth: int, width: int, samples: int = SAMPLES, length: int = LENGTH) -> tuple[list[Kernel], MMDiT]:
    """Return the kernels of forward and backward of one micro-batch, all samples of `length`, and the network."""
    shape = DataShape(VOCABULARY, 1, 0, length, 1, CHANNELS)
    with torch.device("meta"):
        model = MMDiT(ModelConfig(depth=depth, width=width, num_heads=width // 64), shape, "varlen", precision="bf16")
    layout = PackedLayout((length,) * samples, 1)
    recorder = Recorder(4.0 * layout.num_pairs * width)
    with FakeTensorMode(allow_non_fake_inputs=True), assume_device("cuda"):
        materialize(model, "cpu")
        tokens, times = torch.zeros(samples * length, dtype=torch.int64), torch.rand(samples)
        latents, positions = torch.randn(samples, 1, CHANNELS), torch.arange(0, samples * length, 2)
        # Index tensors are made once for a micro-batch, on the host.
        _ = layout.sample_of_token, layout.position, layout.joint_order, layout.joint_inverse, layout.joint_offsets
        with recorder:
            out = model(tokens, latents, times, times, layout, positions, tokens[positions])
            lengths = F.cross_entropy(out.length_logits, tokens[:samples], reduction="sum")
            loss = out.text.sum() + out.latent.square().sum() + lengths
            recorder.phase = "backward"
            loss.backward()
    return recorder.kernels, model


def fuse(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with each run of operators between two products as one."""
    readers: dict[int, list[int]] = defaultdict(list)  # kernels that read a storage
    for number, kernel in enumerate(kernels):
        for access in kernel.reads:
            readers[access.storage].append(number)
    fused = []
    runs = groupby(enumerate(kernels), key=lambda item: (item[1].phase, item[1].kind == "other"))
    for (phase, is_other), numbered in runs:
        run = list(numbered)
        if not is_other:
            fused += [kernel for _, kernel in run]
            continue
        last, written = run[-1][0], set[int]()
        reads, writes = dict[Access, None](), dict[Access, None]()
        for _, kernel in run:
            reads |= dict.fromkeys(access for access in kernel.reads if access.storage not in written)
            written |= {access.storage for access in kernel.writes}
            # What nobody reads are gradients of parameters.
            leaving = (a for a in kernel.writes if not readers[a.storage] or readers[a.storage][-1] > last)
            writes |= dict.fromkeys(leaving)
        fused.append(Kernel(phase, "other", "fused", 0.0, tuple(reads), tuple(writes)))
    return fused


def _is_small(kernel: Kernel) -> bool:
    return kernel.kind == "other" and all(access.size < SMALL_BYTES for access in (*kernel.reads, *kernel.writes))


def predict(kernels: Sequence[Kernel], model: MMDiT, samples: int = SAMPLES, length: int = LENGTH) -> dict[str, Any]:
    """Return times in ms by kind of kernel, their sum, the number of kernels, tokens per second and MFU."""
    ms: dict[str, float] = dict.fromkeys(("products", "attention", "element-wise", "small"), 0.0)
    for kernel in kernels:
        kind = {"product": "products", "attention": "attention"}.get(kernel.kind, "element-wise")
        ms["small" if _is_small(kernel) else kind] += 1e3 * kernel.seconds(RATES)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    ms["update"] = 1e3 * parameters * UPDATE_BYTES / RATES.traffic
    total, tokens = sum(ms.values()), samples * length
    flops = ModelFlops.from_model(model).step_flops(tokens, tokens // 2, samples, 1, samples * (length + 1) ** 2)
    peak = peak_flops(GPU, "bf16")
    assert peak is not None
    return {
        "ms": ms,
        "step_ms": total,
        "kernels": len(kernels),
        "parameters": parameters,
        "tokens_per_s": 1e3 * tokens / total,
        "mfu": 1e3 * flops / total / peak,
    }


def block_costs(width: int = 1024) -> dict[str, Any]:
    """Return the kernels of one block by phase, and the KB for each token that its element-wise ones move."""
    (one, _), (two, _) = (record(depth, width) for depth in (2, 3))

    def costs(kernels: Sequence[Kernel], phase: Phase) -> tuple[int, int]:
        part = [kernel for kernel in kernels if kernel.phase == phase]
        traffic = sum(kernel.traffic for kernel in part if kernel.kind == "other")
        return len(part), traffic

    result = {}
    for phase in ("forward", "backward"):
        (few, less), (many, more) = costs(one, phase), costs(two, phase)  # type: ignore[arg-type]
        result[phase] = {"kernels": many - few, "kb_per_token": (more - less) / SAMPLES / LENGTH / 1e3}
    return result


def _unwritten(fake: Tensor) -> Tensor:
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


def compiled_block_costs(width: int = 1024) -> dict[str, Any]:
    """Return what `block_costs` does, for the compiled region of a block: Inductor's plan for Triton.

    Nothing is built or run, so neither Triton nor a GPU is needed. Tensors count as those of a CPU, for which Inductor
    writes the parts of a concatenation one by one: on a GPU some of these are one kernel.
    """
    import torch._dynamo  # these take seconds: not at the top, so that tests of other parts do not wait for them
    from torch._inductor import config as inductor_config
    from torch._inductor import ir
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError
    from torch._inductor.scheduler import NopKernelSchedulerNode

    config = ModelConfig(width=width, num_heads=width // 64)
    block, layout = MMDiTBlock(config), PackedLayout((LENGTH,) * SAMPLES, 1)
    widths = width, config.resolved_latent_width
    text, latent = torch.empty(layout.num_tokens, width), torch.empty(SAMPLES, widths[1])
    modulations = tuple(torch.empty(SAMPLES, 6 * each, dtype=torch.bfloat16) for each in widths)
    result: dict[str, Any] = {}

    def planned(graph: torch.fx.GraphModule, inputs: Sequence[Any], is_backward: bool = False, **options: Any) -> Any:
        def read(nodes: list[Any]) -> list[Any]:
            views = NopKernelSchedulerNode, ir.MultiOutput
            kernels = [node for node in nodes if not isinstance(node, views[0]) and not isinstance(node.node, views[1])]
            others = [node for node in kernels if not node.is_extern() or "segment_reduce" in str(node.node)]
            traffic = sum(node.get_read_write_buffers_sizes() for node in others)
            costs = {"kernels": len(kernels), "kb_per_token": traffic / SAMPLES / LENGTH / 1e3}
            result["backward" if is_backward else "forward"] = costs
            raise _Planned

        try:
            with inductor_config.patch(cpu_backend="triton", _post_fusion_custom_pass=read):
                compile_fx_inner(graph, inputs, is_backward=is_backward, **options)
        except InductorError as error:
            if not isinstance(error.inner_exception, _Planned):
                raise
        outputs = graph.graph.output_node().args[0]

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [node and _unwritten(node.meta["val"]) for node in outputs]

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    with assume_device("cuda"), torch.autocast("cpu", torch.bfloat16):
        inputs = [each.requires_grad_() for each in (text, latent, *modulations)]
        rotary = rotary_angles(layout.position, 64, config.rope_base)
        rows = StreamRows.of(layout, torch.arange(0))
        attended = rows_to_attend("varlen", layout, LENGTH)
        update = torch.compile(block.update, backend=partial(compile_fx, inner_compile=planned))
        outputs = update(*inputs[:2], tuple(inputs[2:]), rotary, rows, attended, "varlen", None)
    torch.autograd.backward(outputs, [torch.empty_like(out) for out in outputs])
    return result


def host_ms(depth: int, steps: int = 20) -> dict[str, float]:
    """Return the host's milliseconds of an eager step in bf16 by phase: medians of thread time, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = DataShape(512, 1, 0, 8, 1, CHANNELS)
    model = MMDiT(ModelConfig(depth=depth, width=64, num_heads=1), shape, "math", precision="bf16").init_weights()
    layout = PackedLayout((8, 8), 1)
    tokens, times = torch.zeros(16, dtype=torch.int64), torch.rand(2)
    latents, positions = torch.randn(2, 1, CHANNELS), torch.arange(0, 16, 2)
    optimizer, clocks = torch.optim.AdamW(model.parameters(), fused=True), []
    for _ in range(steps + 2):
        with assume_device("cuda"):
            clock = [time.thread_time()]
            out = model(tokens, latents, times, times, layout, positions, tokens[positions])
            lengths = F.cross_entropy(out.length_logits, tokens[:2], reduction="sum")
            loss = out.text.sum() + out.latent.square().sum() + lengths
            clock.append(time.thread_time())
            loss.backward()
            clock.append(time.thread_time())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clocks.append([*clock, time.thread_time()])
    torch.set_num_threads(threads)
    phases = ("forward", "backward", "update")
    spent = [[1e3 * (after - before) for before, after in pairwise(clock)] for clock in clocks[2:]]
    return {phase: median(values) for phase, values in zip(phases, zip(*spent, strict=True), strict=True)}


# --- the page -------------------------------------------------------------------------------------


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of docs/performance.md, with the MFU measured on a GPU as far as it is committed."""
    measured = measured_mfu(committed())
    rows = []
    for size, predictions in result["sizes"].items():
        for (name, row), mode in zip(predictions.items(), ("eager", "compiled"), strict=True):
            mfu = measured.get(size, {}).get(mode)
            rows.append(
                {
                    "network": f"{size}, {row['parameters'] / 1e6:,.0f}M",
                    "kernels are": name,
                    **{f"{kind}, ms": value for kind, value in row["ms"].items()},
                    "step, ms": row["step_ms"],
                    "kernels": row["kernels"],
                    "tokens/s": row["tokens_per_s"],
                    "MFU": f"{row['mfu']:.0%}",
                    "measured": "" if mfu is None else f"{mfu:.1%}",
                }
            )
    depth, host = SIZES[HOST_SIZE][0], result["host"]
    step = result["sizes"][HOST_SIZE]["eager"]["step_ms"]
    spent = ", ".join(f"{ms:.0f} {phase}" for phase, ms in host.items())
    total = sum(host.values())
    text = (
        f"The host takes at most {total:.0f} ms for an eager step of {depth} blocks ({spent}), on one thread of a "
        f"CPU of 2 cores: {total / step:.2f} of the {step:.0f} ms predicted for the GPU at {HOST_SIZE}."
    )
    return {"roofline": markdown(rows), "roofline-host": text}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("roofline", __doc__ or "")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of roofline.json (%(default)s)")
    options = parser.parse_args(argv)
    sizes = {}
    for name, (depth, width) in SIZES.items():
        print_status(name)
        kernels, model = record(depth, width)
        sizes[name] = {"eager": predict(kernels, model), "fused": predict(fuse(kernels), model)}
    result = {
        "benchmark": "roofline",
        "what": {
            "gpu": GPU,
            "samples": SAMPLES,
            "length": LENGTH,
            "vocabulary": VOCABULARY,
            "torch": torch.__version__,
        },
        "block": block_costs(),
        "compiled_block": compiled_block_costs(),
        "sizes": sizes,
        "host": host_ms(SIZES[HOST_SIZE][0]),
    }
    write_json(result, options.out, "roofline")
    print(blocks(result)["roofline"])
    return 0
