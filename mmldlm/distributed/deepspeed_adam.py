"""DeepSpeed's own AdamW: CPUAdam where the optimizer is offloaded to the host, FusedAdam on CUDA."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import named


def build_deepspeed_adam(groups: list[dict[str, Any]], offloaded: bool, **options: Any) -> torch.optim.Optimizer:
    """Its kernel is compiled at first use, about a minute; `ConfigError` with what is missing where it cannot be."""
    beside = str(Path(sys.executable).parent)  # where pip puts ninja, also of an environment that is not activated
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + beside
    try:
        if offloaded:
            return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return FusedAdam(groups, adam_w_mode=True, **options)
    except Exception as error:  # DeepSpeed, PyTorch and the loader of libraries have a type of their own each
        op = "CPUAdam" if offloaded else "FusedAdam"
        raise ConfigError(
            f"optim.name: deepspeed_adam is DeepSpeed's {op}, whose kernel could not be built or loaded: "
            f"{_missing(offloaded) or _complaint(error.__cause__ or error)}; adamw needs none"
        ) from error


def replay_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring CPUAdam where it is after so many steps.

    It keeps beta^step as a running product, which is not among its state and is, in float32, not the power that it
    would start from otherwise. 20 microseconds a step.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    dummy, groups = torch.nn.Parameter(torch.zeros(1)), optimizer.param_groups
    dummy.grad = torch.zeros(1)
    optimizer.param_groups = [{**groups[0], "params": [dummy]}]
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups = groups
    del optimizer.state[dummy]


def _missing(offloaded: bool) -> str:
    """Tools that the build needs and that are not on the PATH."""
    tools = [os.environ.get("CXX", "c++"), "ninja", *([] if offloaded else ["nvcc"])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"no {', no '.join(missing)} on the PATH" if missing else ""


def _complaint(error: BaseException) -> str:
    """Of a compiler's output the line that says what is wrong, else the first."""
    lines = str(error).splitlines() or [type(error).__name__]
    return named(next((line for line in lines[1:] if "error" in line.lower()), lines[0]).strip())
