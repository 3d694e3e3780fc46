"""Regional `torch.compile`: fused kernels for the blocks and the text head.

All blocks share the compiled code, and its shapes are symbolic: neither the depth nor micro-batches of other lengths
cause a recompilation. On a GPU, where the attention reads tensors alone (`attention.JOINT_BACKENDS`), each block is a
region, and text head and text loss are one more. On a CPU the shapes in the attention follow the lengths of the
samples, so each stream has one region before the attention and one after it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mmldlm.model.activation_checkpoint import Recomputed
from mmldlm.model.attention import JOINT_BACKENDS
from mmldlm.model.mmdit import BlockStream, MMDiT, MMDiTBlock
from mmldlm.model.ops import runs_on_cpu
from mmldlm.settings.declaration import require_effect, setting

TORN_AFTER_S, _POLL_S = 10.0, 0.5  # a file that has not changed for this long has no linker that still writes it


@dataclass(frozen=True)
class CompileConfig:
    """Settings of `torch.compile`."""

    scope: Literal["auto", "none", "regional"] = setting(
        "auto",
        "what torch.compile compiles. regional: each block (on a CPU without its attention) and, on a GPU, the "
        "text head. The first step then takes a minute or two longer. none: nothing. auto: regional on GPUs "
        "except under ZeRO-3, otherwise none",
        advice="none to debug. regional also for long runs on CPUs with a C++ compiler: 1.15 x the speed in fp32, 1.3 "
        "x in bf16",
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = setting(
        "default", "mode of torch.compile. max-autotune tries more kernels, and takes far longer to start"
    )
    graphs: Literal["auto"] | bool = setting(
        "auto",
        "CUDA graphs: the forward and backward pass of a micro-batch are recorded once for each bucket of "
        "sizes, and later started by one call. Micro-batches are filled up to the bucket's sizes by rows that "
        "no loss counts. auto: on a GPU, if one process trains",
        advice="false if memory is short, since recorded passes keep the memory of their activations. true to use them "
        "under ddp as well, which nobody has tried on several GPUs yet",
    )

    def __post_init__(self) -> None:
        require_effect(self, "mode", "scope", "auto", "regional")


class Region:
    """A function that runs compiled if gradients are enabled, otherwise eagerly, as in validation."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]):
        import torch._dynamo  # takes seconds: not at the top, so that only runs that compile wait for it

        self.function, self.mark_dynamic = function, torch._dynamo.maybe_mark_dynamic
        # Only the dimensions that `__call__` marks are symbolic.
        self.compiled = torch.compile(function, dynamic=False, options=options)

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        for leaf in tree_leaves(args):
            # All blocks get the same index tensors, so we mark each tensor once.
            if isinstance(leaf, torch.Tensor) and not hasattr(leaf, "_dynamo_weak_dynamic_indices"):
                self.mark_dynamic(leaf, 0)  # the number of rows or samples varies, widths are fixed
        return self.compiled(*args)


def compile_regions(model: MMDiT, config: CompileConfig, device: torch.device, is_supported: bool = True) -> str:
    """Compile in place the regions that the model's `backend` determines, and return a description for the report.

    If the regions were requested but cannot be compiled, the description says why. With `is_supported` False, scope
    `auto` compiles nothing: the engine does not run compiled regions.
    """
    if config.scope == "none" or (config.scope == "auto" and (device.type == "cpu" or not is_supported)):
        return "none"
    try:
        remove_torn_kernels()
        torch.compile(lambda x: (x * 2).relu() + 1)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler raises errors of many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"none, though {config.scope} was requested: torch.compile does not run here ({reason})"
    for module, method in regions(model):
        function, options = getattr(module, method), _options(module, config.mode)
        if isinstance(function, Recomputed):  # the recomputation stays outside of the compiled region
            function.function = Region(function.function, options)
        else:
            setattr(module, method, Region(function, options))
    return f"regional, mode {config.mode}"


def _options(module: nn.Module, mode: str) -> dict[str, Any]:
    """Return the compiler's options for a region. In a whole block one kernel casts all weights."""
    import torch._inductor

    options: dict[str, Any] = torch._inductor.list_mode_options(mode)
    # Two draws of random numbers cannot share a kernel (PyTorch's issue 168124).
    is_on_gpu = not runs_on_cpu(next(module.parameters()))
    if isinstance(module, MMDiTBlock) and is_on_gpu and not module.text.dropout.p:
        options |= {"combo_kernels": True, "combo_kernels_pointwise_only": True, "combo_kernel_max_num_nodes": 32}
    return {name: value for name, value in options.items() if hasattr(torch._inductor.config, name)}


def remove_torn_kernels() -> None:
    """Remove half-written kernels, which a killed process leaves in torch's cache: every later start would fail."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for path in [*Path(cache_dir()).glob("*/*.so"), *Path(cache_dir()).glob("*/*.o")]:
        with suppress(FileNotFoundError):  # another start is removing it
            while not (is_whole := _is_whole(path)) and time.time() - path.stat().st_mtime < TORN_AFTER_S:
                time.sleep(_POLL_S)
            if not is_whole:
                path.unlink()


def _is_whole(path: Path) -> bool:
    """Return whether an ELF file has all of its section headers, which stand at its end."""
    with path.open("rb") as file:
        header = file.read(64)
    if header[:4] != b"\x7fELF":  # the file is still empty, or another system has written it
        return bool(header.strip(b"\0"))
    offset, entry_bytes, entries = struct.unpack_from("<Q10xHH", header.ljust(64, b"\0"), 40)
    return offset > 0 and offset + entry_bytes * entries <= path.stat().st_size


def regions(model: MMDiT) -> list[tuple[nn.Module, str]]:
    """Return the regions as pairs of a module and the name of its method."""
    if model.backend in JOINT_BACKENDS:
        return [*((block, "forward") for block in model.blocks), (model, "predict_text")]
    return [
        region
        for stream in model.modules()
        if isinstance(stream, BlockStream)
        for region in ((stream, "project"), (stream.head_norm, "forward"), (stream, "residual"))
    ]
