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
    """Build CPUAdam, which steps on the host, if `offloaded`, else FusedAdam; `options` are lr, betas and eps.

    The kernel is compiled at first use, which takes about a minute; a `ConfigError` names what is missing for that.
    """
    bin_dir = str(Path(sys.executable).parent)  # pip installs ninja here; not on the PATH of an inactive environment
    if bin_dir not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + bin_dir
    try:
        if offloaded:
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return FusedAdam(groups, adam_w_mode=True, **options)
    except Exception as error:  # DeepSpeed, PyTorch and the dynamic linker each raise types of their own
        tools = [os.environ.get("CXX", "c++"), "ninja", *([] if offloaded else ["nvcc"])]
        missing = [f"no {tool} on the PATH" for tool in tools if shutil.which(tool) is None]
        # Of a compiler's output, the line that states the error.
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines()] or [type(error).__name__]
        reason = next((line for line in lines[1:] if "error" in line.lower()), lines[0])
        raise ConfigError(
            f"optim.name: deepspeed_adam is DeepSpeed's {'CPUAdam' if offloaded else 'FusedAdam'}, whose kernel could "
            f"not be built or loaded: {', '.join(missing) or display_name(reason)}; adamw needs none"
        ) from error


def replay_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring CPUAdam's internal step count to `steps`.

    It keeps beta^step as a running product that is not part of its state. In float32 this product differs from the
    power that CPUAdam would otherwise start from. Takes 20 microseconds per step.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    dummy, groups = torch.nn.Parameter(torch.zeros(1)), optimizer.param_groups
    dummy.grad = torch.zeros(1)
    # The product has no setter, but a step on a single element with the same betas advances it as a real step does.
    optimizer.param_groups = [{**groups[0], "params": [dummy]}]
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups = groups
    del optimizer.state[dummy]
