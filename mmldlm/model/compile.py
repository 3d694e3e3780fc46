"""Regional `torch.compile`: fused kernels for everything in a block but the attention.

All blocks share the compiled code, and its shapes are symbolic: neither the depth nor micro-batches of other lengths
cause a recompilation. Attention is not compiled: on a CPU its shapes follow the lengths of the samples, and on a GPU it
is one kernel in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from mmldlm.model.mmdit import MMDiT
from mmldlm.settings.fields import require_effect, setting

REGIONS = ("project", "normalize", "residual")  # methods of `BlockStream`


@dataclass(frozen=True)
class CompileConfig:
    """Settings of `torch.compile`."""

    scope: Literal["none", "regional"] = setting(
        "none",
        "torch.compile; regional: each block without its attention; takes a minute or two at the first step",
        advice="For long runs. Also on CPUs with a C++ compiler: 1.15 x the speed in fp32, 1.3 x in bf16. Not under "
        "ZeRO-3",
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = setting(
        "default", "mode of torch.compile; max-autotune tries more kernels and takes far longer to start"
    )

    def __post_init__(self) -> None:
        require_effect(self, "mode", "scope", "regional")


class Region:
    """A function that runs compiled if gradients are enabled, otherwise eagerly, as in validation."""

    def __init__(self, function: Callable[..., Any], mode: str):
        import torch._dynamo  # takes seconds: not at the top, so that only runs that compile wait for it

        self.function, self.mark_dynamic = function, torch._dynamo.maybe_mark_dynamic
        # Only the dimensions that `__call__` marks are symbolic.
        self.compiled = torch.compile(function, dynamic=False, mode=mode)

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*args)
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor):
                self.mark_dynamic(leaf, 0)  # rows or samples; widths are fixed
        return self.compiled(*args)


def compile_regions(model: MMDiT, config: CompileConfig, device: torch.device) -> str:
    """Compile the model's regions in place.

    Returns:
        A description of what was compiled, with the reason if it is not what the config requests.
    """
    if config.scope == "none":
        return "none"
    try:
        torch.compile(lambda x: (x * 2).relu() + 1)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler raises errors of many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"none, though regional was requested: torch.compile does not run here ({reason})"
    for block in model.blocks:
        for stream in (block.text, block.latent):
            for name in REGIONS:
                setattr(stream, name, Region(getattr(stream, name), config.mode))
    return f"regional, mode {config.mode}"
