"""The DeepSpeed file: values that the run config determines are filled in; contradicting ones are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.utils.nested import flatten
from mmldlm.utils.short_repr import short_repr

AUTO = "auto"
OFFLOAD_SECTIONS = ("offload_optimizer", "offload_param")
# Sections that would be a second source of settings, with the run config's key for these settings.
REJECTED_SECTIONS = {
    "optimizer": "optim",
    "scheduler": "schedule",
    "activation_checkpointing": "memory.activation_checkpointing",
    "amp": "precision",
    "torch_autocast": "precision",
    "curriculum_learning": "train",
}


@dataclass(frozen=True)
class StepPlan:
    """Batch sizes, clipping and precision of a step, which an engine needs before it wraps the model."""

    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    clip_norm: float
    precision: str


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed file.

    Raises:
        ConfigError: The file does not exist or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"DeepSpeed file {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"DeepSpeed file {path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def engine_name(config: Mapping[str, Any], path: str) -> str:
    """Return zero1, zero2, zero3, zero2_offload or zero3_offload.

    Raises:
        ConfigError: The file has no valid stage or offload section.
    """
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage: expected 1, 2 or 3, found {short_repr(stage)}")
    offloads = False
    for key in OFFLOAD_SECTIONS:
        section = zero.get(key) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: zero_optimization.{key}: expected keys below it, found {short_repr(section)}")
        offloads |= _offload_device(config, key) != "none"
    return f"zero{stage}_offload" if offloads else f"zero{stage}"


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer steps on the host. `engine_name` must have checked the file."""
    return bool(_offload_device(config, "offload_optimizer") != "none")


def check_ema(decay: float, deepspeed: Mapping[str, Any] | None) -> None:
    """Raise `ConfigError` if a DeepSpeed config keeps master weights on NVMe, where the EMA cannot read them."""
    for key in OFFLOAD_SECTIONS:
        if decay and deepspeed is not None and _offload_device(deepspeed, key) == "nvme":
            raise ConfigError(
                f"ema.decay: {decay:g} needs master weights in memory, found zero_optimization.{key}.device "
                "nvme in the DeepSpeed file; expected cpu or none there, or ema.decay 0"
            )


def _offload_device(config: Mapping[str, Any], key: str) -> Any:
    section = config["zero_optimization"].get(key) or {}
    return section.get("device", "none")


def resolve_deepspeed_config(
    config: Mapping[str, Any], path: str, plan: StepPlan, secondary_partition: int = 1
) -> dict[str, Any]:
    """Return `config` with every "auto" filled in from the run config.

    Args:
        config: Content of the DeepSpeed file.
        path: Name of the file in messages.
        plan: The run config's values.
        secondary_partition: Value of an "auto" of ZeRO-3's `zero_hpz_partition_size`.

    Raises:
        ConfigError: A value contradicts the run config, a section would be a second source of its settings, or an
            "auto" has no value. The message names all of them.
    """
    resolved = deepcopy(dict(config))
    problems = [
        f"{section}: expected nothing (the run config's {key} is the source), found a section"
        for section, key in REJECTED_SECTIONS.items()
        if section in resolved
    ]
    if resolved["zero_optimization"].get("zero_hpz_partition_size") == AUTO:
        resolved["zero_optimization"]["zero_hpz_partition_size"] = secondary_partition
    # Key of the DeepSpeed file -> the run's value, and where that comes from.
    from_run: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (plan.micro_batch_size, "train.micro_batch_size"),
        "gradient_accumulation_steps": (
            plan.accumulation,
            "train.global_batch_size / (micro_batch_size x processes)",
        ),
        "train_batch_size": (plan.global_batch_size, "train.global_batch_size"),
        "gradient_clipping": (plan.clip_norm, "optim.clip_norm"),
        "bf16.enabled": (plan.precision == "bf16", "precision"),
        "fp16.enabled": (False, "precision"),
        # By default DeepSpeed refuses some optimizers, and all but CPUAdam where the optimizer is offloaded.
        "zero_allow_untested_optimizer": (True, "optim"),
        "zero_force_ds_cpu_optimizer": (False, "optim"),
    }
    for dotted, (value, key) in from_run.items():
        *parents, leaf = dotted.split(".")
        section = resolved
        for parent in parents:
            section = section.setdefault(parent, {})
        current = section.get(leaf, AUTO)
        if current == AUTO:
            section[leaf] = value
        # True equals 1 in Python: `gradient_clipping: true` must not pass for a norm of 1.
        elif current != value or isinstance(current, bool) != isinstance(value, bool):
            problems.append(f"{dotted} is {json.dumps(current)}, but {json.dumps(value)} by the run config ({key})")
    unresolved = [name for name, value in flatten(resolved).items() if value == AUTO]
    problems += [f'{name}: "auto" is not supported here, expected a value' for name in unresolved]
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return resolved
