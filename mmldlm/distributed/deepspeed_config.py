"""The DeepSpeed file: values that the run config determines are filled in; contradicting ones are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.distributed.deepspeed_keys import AUTO, QUANTIZED
from mmldlm.errors import ConfigError
from mmldlm.utils.nested import flatten
from mmldlm.utils.short_repr import short_repr

OFFLOAD_SECTIONS = ("offload_optimizer", "offload_param")
OFFLOAD_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class StepPlan:
    """Batch sizes, clipping and precision of a step, and the model's width: what an engine needs before the model."""

    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    clip_norm: float
    precision: str
    width: int  # D of the text stream


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed file, or raise `ConfigError` if it does not exist or is not a JSON object."""
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
    """Return zero1, zero2, zero3, zero2_offload or zero3_offload; other stages and offloads are a `ConfigError`."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    if stage not in (1, 2, 3) or not isinstance(stage, int) or isinstance(stage, bool):
        advice = "; for 0 use distributed_type: MULTI_GPU, or torchrun without a DeepSpeed file" if stage == 0 else ""
        raise ConfigError(f"{path}: zero_optimization.stage: expected 1, 2 or 3, found {short_repr(stage)}{advice}")
    offloads = False
    for key, stages in zip(OFFLOAD_SECTIONS, ((2, 3), (3,)), strict=True):
        section, name = zero.get(key) or {}, f"zero_optimization.{key}"
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: {name}: expected keys below it, found {short_repr(section)}")
        device = section.get("device", "none")
        if device not in OFFLOAD_DEVICES:
            raise ConfigError(
                f"{path}: {name}.device: expected {', '.join(OFFLOAD_DEVICES)}, found {short_repr(device)}"
            )
        if device == "nvme" and not isinstance(section.get("nvme_path"), str):
            raise ConfigError(
                f"{path}: {name}.nvme_path: expected a folder, in a DeepSpeed file (Accelerate passes none on), found "
                f"{short_repr(section.get('nvme_path'))}"
            )
        if device != "none" and stage not in stages:
            expected = " or ".join(map(str, stages))
            raise ConfigError(f"{path}: {name}.device: expected none, or stage {expected}, found {device} at {stage}")
        offloads |= device != "none"
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
    config: Mapping[str, Any], path: str, plan: StepPlan, device_type: str = "cpu", secondary_partition: int = 1
) -> dict[str, Any]:
    """Return `config` with every "auto" filled in from the run config.

    Args:
        config: Content of the DeepSpeed file, checked by `check_keys` and `engine_name`.
        path: Name of the file in messages.
        secondary_partition: Value of an "auto" of ZeRO-3's `zero_hpz_partition_size`.

    Raises:
        ConfigError: A value contradicts the run config, or does not fit the launch, or an "auto" has no value. The
            message names all of them.
    """
    resolved, problems = deepcopy(dict(config)), list[str]()
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
        # Under all engines weights, accumulated gradients and moments are float32, also with bf16.
        "bf16.bf16_master_weights_and_grads": (False, "precision"),
        "bf16.bf16_optimizer_states": (False, "precision"),
        "data_types.grad_accum_dtype": ("fp32", "precision"),
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
            problems.append(
                f"{dotted} is {json.dumps(current)}, but {json.dumps(value)} by the run config ({key}); remove it or "
                'write "auto"'
            )
    resolved["fp16"] = {"enabled": False}  # the other keys are those of its loss scale
    _fill_buckets(resolved["zero_optimization"], plan.width)
    flat = flatten(resolved)
    problems += [
        f"{name}: expected false without CUDA, found {json.dumps(flat[name])}; remove it"
        for name in QUANTIZED
        if flat.get(name) and device_type != "cuda"
    ]
    problems += [
        f'{name}: "auto" is not supported here, expected a value; remove it' for name in flat if flat[name] == AUTO
    ]
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return resolved


def _fill_buckets(zero: dict[str, Any], width: int) -> None:
    """Fill in the sizes that Hugging Face's trainer takes from the model's width, by its rule."""
    sizes = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": width * width * 9 // 10,
        "stage3_param_persistence_threshold": 10 * width,
    }
    zero.update({key: size for key, size in sizes.items() if zero.get(key) == AUTO})
