"""The DeepSpeed config of a launch. Accelerate reads it, DeepSpeed's types check it, the run config completes it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.distributed.library_calls import library_call
from mmldlm.errors import ConfigError
from mmldlm.utils.nested import flatten
from mmldlm.utils.short_repr import short_repr

if TYPE_CHECKING:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

AUTO = "auto"
SECTION = "deepspeed_config of the accelerate config"  # stands for the file in messages
OFFLOADS = ("offload_optimizer", "offload_param")
QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
# We have not tested these ZeRO keys. They change the results of a run, or how it is divided.
_UNTESTED = (
    "zenflow",
    "legacy_stage1",
    "parameter_alignment",
    "zero_quantized_nontrainable_weights",
    "offload_optimizer.ratio",
    "offload_optimizer.super_offload",
)
# Keys that take effect. DeepSpeed refuses unknown keys below them, but ignores unknown keys next to them.
KNOWN = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16 data_types
    communication_data_type prescale_gradients gradient_predivide_factor zero_optimization
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio comms_logger
""".split()  # noqa: SIM905 - a list would take 15 lines
# Keys that we leave out: output, and whatever the run config has settings for.
LEFT_OUT = """
    steps_per_print wall_clock_breakdown memory_breakdown flops_profiler dump_state checkpoint tensorboard csv_monitor
    wandb comet dataloader_drop_last optimizer scheduler
""".split()  # noqa: SIM905
SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types", "optimizer", "scheduler")
# Values for a section of the accelerate file that leaves them open, as in ds_configs/.
_BUCKETS = {"reduce_bucket_size": 100_000_000, "allgather_bucket_size": 100_000_000}


@dataclass(frozen=True)
class StepPlan:
    """What an engine must know before it has a model: batch sizes, clipping and precision of a step, and the width."""

    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    clip_norm: float
    precision: str
    width: int  # D of the text stream


@dataclass(frozen=True)
class DeepSpeedFile:
    """The DeepSpeed config of a launch, before the run config completes it."""

    name: str  # for messages
    content: Mapping[str, Any]  # with its "auto" values
    zero: DeepSpeedZeroConfig  # the section zero_optimization, as DeepSpeed reads it
    notices: tuple[str, ...]  # for the user
    problems: tuple[str, ...] = ()  # `resolve` reports them together with problems of the run config

    @property
    def engine(self) -> str:
        """Name of the engine: zero1, zero2, zero3, zero2_offload or zero3_offload."""
        offloads = any(self.device(offload) != "none" for offload in OFFLOADS)
        return f"zero{int(self.zero.stage)}{'_offload' if offloads else ''}"

    @property
    def precision(self) -> str:
        """The precision that the file enables, bf16, or "no"."""
        return "bf16" if self.content.get("bf16", {}).get("enabled") is True else "no"

    @property
    def secondary_partition(self) -> int:
        """Number of processes that share a second copy of ZeRO-3's weights (hpZ, arXiv 2306.10209), 1 for none."""
        return int(self.zero.zero_hpz_partition_size)

    def device(self, offload: str) -> str:
        """Return where the optimizer or the weights are (one of `OFFLOADS`): none, cpu or nvme."""
        section = getattr(self.zero, offload)
        return "none" if section is None else str(section.device)

    def check_ema(self, decay: float) -> None:
        """Raise `ConfigError` if master weights are on NVMe, where an EMA cannot read them."""
        for offload in OFFLOADS:
            if decay and self.device(offload) == "nvme":
                raise ConfigError(
                    f"ema.decay: {decay:g} needs master weights in memory, found zero_optimization.{offload}.device "
                    f"nvme in {self.name}; expected cpu or none there, or ema.decay 0"
                )

    def resolve(self, plan: StepPlan) -> dict[str, Any]:
        """Return the config with every "auto" filled in from the run config.

        A `ConfigError` names all problems: keys that mean nothing here, values that contradict the run config, and
        every "auto" that has no value.
        """
        resolved, problems = deepcopy(dict(self.content)), [*self.problems]
        # Key of the DeepSpeed file -> (the run's value, the setting that it comes from).
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
            # Weights, accumulated gradients and moments are float32 under every engine, also with bf16.
            "bf16.bf16_master_weights_and_grads": (False, "precision"),
            "bf16.bf16_optimizer_states": (False, "precision"),
            "data_types.grad_accum_dtype": ("fp32", "precision"),
            # By default DeepSpeed refuses some optimizers, and with offload all but CPUAdam.
            "zero_allow_untested_optimizer": (True, "optim"),
            "zero_force_ds_cpu_optimizer": (False, "optim"),
        }
        for dotted, (value, key) in from_run.items():
            name, _, leaf = dotted.rpartition(".")
            section = resolved.setdefault(name, {}) if name else resolved
            current = section.get(leaf, AUTO)
            if current == AUTO:
                section[leaf] = value
            # True equals 1 in Python: `gradient_clipping: true` must not pass for a norm of 1.
            elif current != value or isinstance(current, bool) != isinstance(value, bool):
                problems.append(
                    f"{dotted} is {json.dumps(current)}, but {json.dumps(value)} by the run config ({key}); remove it "
                    'or write "auto"'
                )
        resolved["fp16"] = {"enabled": False}  # all other keys configure its loss scale
        zero, width = resolved["zero_optimization"], plan.width
        # Hugging Face's trainer derives these from the model's width.
        sizes = {
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": width * width * 9 // 10,
            "stage3_param_persistence_threshold": 10 * width,
        }
        zero.update({key: size for key, size in sizes.items() if zero.get(key) == AUTO})
        problems += [
            f'{name}: "auto" is not supported for this key; give a value, or remove the key'
            for name, value in flatten(resolved).items()
            if value == AUTO
        ]
        if problems:
            raise ConfigError(f"{self.name}: " + "; ".join(problems))
        with library_call(f"{self.name}: bf16", {}):
            from deepspeed.runtime.precision_config import DeepSpeedBF16Config

            DeepSpeedBF16Config(**resolved["bf16"])
        return resolved


def read_deepspeed(path: str, variables: Mapping[str, str], world_size: int, local_world_size: int) -> DeepSpeedFile:
    """Return the DeepSpeed config of a launch: the file at `path`, or without one the section of the accelerate file.

    That section arrives in Accelerate's `variables`. If Accelerate or DeepSpeed refuse a value, if DeepSpeed would
    ignore a key, or if there is no such engine, this is a `ConfigError`.
    """
    name = path or SECTION
    given, problems = _read_file(Path(path)) if path else ({}, [])
    # Without a value, Accelerate would assume 1.
    content = {"gradient_accumulation_steps": AUTO, **given} if path else None
    with library_call(name, variables):
        from accelerate import DeepSpeedPlugin

        config = DeepSpeedPlugin(hf_ds_config=content).deepspeed_config
    section = config["zero_optimization"]
    if content is None:
        config["communication_data_type"] = "fp32"
        section |= _BUCKETS
    if section.get("zero_hpz_partition_size") == AUTO:
        section["zero_hpz_partition_size"] = local_world_size
    zero = _read_zero(section, name)
    unused = [key for key, value in (content or {}).items() if key in LEFT_OUT and value not in (False, None, AUTO)]
    notices = [f"{name}: no effect here: {', '.join(unused)}"] if unused else []
    notices += [
        f"{name}: zero_optimization.{key}: the loss curve will differ from other engines"
        for key in QUANTIZED
        if getattr(zero, key)
    ]
    used = {key: value for key, value in config.items() if key not in LEFT_OUT}
    file = DeepSpeedFile(name, used, zero, tuple(notices), tuple(problems))
    _check_zero(file, world_size)
    return file


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a DeepSpeed file, and a line for each key that means nothing here."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        where = "" if path.is_absolute() else f" (relative to {Path.cwd()}: start where it is, or name it absolutely)"
        raise ConfigError(f"DeepSpeed file {path}: cannot be read: {error.strerror}{where}") from None
    except ValueError as error:
        raise ConfigError(f"DeepSpeed file {path} is not readable JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(content).__name__}")
    problems = []
    for key, value in content.items():
        if key not in (*KNOWN, *LEFT_OUT):
            close = difflib.get_close_matches(key, KNOWN, n=1)
            advice = f"did you mean {close[0]!r}?" if close else "remove it (see docs/launchers.md)"
            problems.append(f"{key}: unknown or unsupported key, {advice}")
        if key in SECTIONS and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key}: expected keys below it, found {short_repr(value)}")
    for key, source, types in (("optimizer", "optim", ("Adam", "AdamW")), ("scheduler", "schedule", ())):
        values = flatten(content.get(key, {}))
        kind = values.pop("type", "AdamW")
        # Flags such as torch_adam choose an implementation. Here `optim.name` and `optim.fused` do that.
        if any(v not in (AUTO, {}) and v is not True for v in values.values()) or (types and kind not in types):
            problems.append(
                f"{key}: expected nothing or only {AUTO!r} (the run config's {source} is the source), found "
                f"{short_repr(content[key])}; remove the section"
            )
    _read_zero(content.get("zero_optimization", {}), str(path))  # Accelerate does not check the types
    return {key: value for key, value in content.items() if key in (*KNOWN, *LEFT_OUT)}, problems


def _read_zero(section: Mapping[str, Any], name: str) -> DeepSpeedZeroConfig:
    with library_call(f"{name}: zero_optimization", {}):
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        return DeepSpeedZeroConfig(**section)


def _check_zero(file: DeepSpeedFile, world_size: int) -> None:
    """Raise `ConfigError` if no engine does what DeepSpeed would do with this config."""
    zero, key = file.zero, f"{file.name}: zero_optimization"
    if zero.stage == 0:
        raise ConfigError(f"{key}.stage: expected 1, 2 or 3, found 0; for DDP use distributed_type: MULTI_GPU")
    for offload, stages in zip(OFFLOADS, ((2, 3), (3,)), strict=True):
        device = file.device(offload)
        if device != "none" and zero.stage not in stages:
            expected = " or ".join(map(str, stages))
            raise ConfigError(f"{key}.{offload}.device: expected none, or stage {expected}, found {device}")
        if device == "nvme" and str(getattr(zero, offload).nvme_path).lower() == "none":
            raise ConfigError(f"{key}.{offload}.nvme_path: expected a folder, in a DeepSpeed file, found none")
    for name, value in flatten(file.content["zero_optimization"]).items():
        if name.startswith(_UNTESTED) and value not in (None, False, 1):
            raise ConfigError(f"{key}.{name}: expected nothing (no engine here supports it), found {short_repr(value)}")
    size = file.secondary_partition
    if size != 1 and (size < 1 or world_size % size or zero.stage != 3):
        raise ConfigError(
            f'{key}.zero_hpz_partition_size: expected "auto" or a number that divides the {world_size} processes, at '
            f"stage 3; found {size} at stage {zero.stage}"
        )
