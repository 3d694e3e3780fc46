"""Regional `torch.compile`: what the blocks compute between their attentions becomes fused kernels.

All blocks share the compiled code, and its shapes are symbolic: neither depth nor micro-batches of other lengths make
it compile again. Attention stays outside, since on a CPU it follows the lengths of the samples, and on a GPU it is one
kernel in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from mmldlm.errors import ConfigError
from mmldlm.model.mmdit import MMDiT
from mmldlm.settings.fields import setting

REGIONS = ("project", "normalize", "branch", "finish")


@dataclass(frozen=True)
class CompileConfig:
    scope: Literal["none", "regional"] = setting(
        "none", "torch.compile; regional: each block's parts between the attentions; a minute or two at the first step"
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = setting(
        "default", "of torch.compile; max-autotune tries more kernels, and takes far longer to start"
    )

    def __post_init__(self) -> None:
        if self.scope == "none" and self.mode != "default":
            raise ValueError(f"mode: {self.mode} needs compile.scope: regional, found none")


def check_compile(config: CompileConfig, engine: str) -> None:
    """`ConfigError` where compiled regions cannot run under the engine."""
    if config.scope == "none":
        return
    if engine.startswith("zero3"):
        raise ConfigError(
            f"compile.scope: expected none under {engine}, found regional; ZeRO-3 gathers weights by hooks within the "
            "regions (fsdp2 shards weights, too, and compiles)"
        )


class Region:
    """A function that runs compiled where gradients are asked for, else as it is: validation has other needs."""

    def __init__(self, function: Callable[..., Any], mode: str):
        import torch._dynamo  # takes seconds, which commands and runs that compile nothing do not have to wait

        self.function, self.mark = function, torch._dynamo.maybe_mark_dynamic
        self.compiled = torch.compile(function, dynamic=False, mode=mode)

    def __call__(self, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.function(*arguments)
        for argument in tree_leaves(arguments):
            if isinstance(argument, torch.Tensor):
                self.mark(argument, 0)  # rows or samples; widths are fixed
        return self.compiled(*arguments)


def compile_regions(model: MMDiT, config: CompileConfig, device: torch.device) -> str:
    """Compile the model's regions in place. Returns what was done, with the reason where it is not what was asked."""
    if config.scope == "none":
        return "none"
    try:
        torch.compile(lambda x: (x * 2).relu() + 1)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler's absence makes of itself
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"none, though regional was asked for: torch.compile does not run here ({reason})"
    for block in model.blocks:
        for stream in (block.text, block.latent):
            for name in REGIONS:
                setattr(stream, name, Region(getattr(stream, name), config.mode))
    return f"regional, mode {config.mode}"
