"""DeepSpeed's own AdamW: CPUAdam if the optimizer is offloaded to the host, FusedAdam on CUDA."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import display_name


def build_deepspeed_adam(groups: list[dict[str, Any]], offloaded: bool, **options: Any) -> torch.optim.Optimizer:
    """Build CPUAdam, which steps on the host, if `offloaded`, else FusedAdam. `options` are lr, betas and eps.

    The first use compiles the kernel, for about a minute. If that fails, a `ConfigError` names the missing tool.
    """
    bin_dir = str(Path(sys.executable).parent)  # pip installs ninja here, which may not be on PATH
    if bin_dir not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + bin_dir
    try:
        if offloaded:
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return FusedAdam(groups, adam_w_mode=True, **options)
    except Exception as error:  # DeepSpeed, PyTorch and the linker raise different types
        tools = [os.environ.get("CXX", "c++"), "ninja", *([] if offloaded else ["nvcc"])]
        missing = [f"no {tool} on the PATH" for tool in tools if shutil.which(tool) is None]
        # Find the line in the compiler's output that states the error.
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines()] or [type(error).__name__]
        reason = next((line for line in lines[1:] if "error" in line.lower()), lines[0])
        raise ConfigError(
            f"optim.name: deepspeed_adam is DeepSpeed's {'CPUAdam' if offloaded else 'FusedAdam'}, whose kernel could "
            f"not be built or loaded: {', '.join(missing) or display_name(reason)}; adamw needs none"
        ) from error


def replay_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring CPUAdam's internal step count to `steps`.

    CPUAdam keeps beta^step as a running product outside of its state. In float32, this product differs from the power
    that it would otherwise start from. Each step takes 20 microseconds.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    dummy, groups = torch.nn.Parameter(torch.zeros(1)), optimizer.param_groups
    dummy.grad = torch.zeros(1)
    # The product has no setter. A step on a single element with the same betas advances it like a real step.
    optimizer.param_groups = [{**groups[0], "params": [dummy]}]
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups = groups
    del optimizer.state[dummy]
