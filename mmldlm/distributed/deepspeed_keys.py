"""Keys of a DeepSpeed file: those that take effect, those without effect here, and what to use instead of others.

The list is that of DeepSpeed 0.19 (`runtime/config.py`, `runtime/zero/config.py`) without what no test of ours covers:
DeepSpeed ignores keys that it does not know, and others change what a run computes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mmldlm.errors import ConfigError
from mmldlm.utils.short_repr import display_name, short_repr

AUTO = "auto"
QUANTIZED = ("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients")

_KEYS = {  # by section, "" for the top level; a section is listed as a key of its parent as well
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        communication_data_type prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer
        zero_force_ds_cpu_optimizer zero_optimization bf16 fp16 data_types aio comms_logger
    """,
    "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
    """,
    "data_types": "grad_accum_dtype",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "comms_logger": "enabled prof_all prof_ops verbose debug",
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size overlap_comm offload_param offload_optimizer sub_group_size
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
        round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients
        memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks
    """,
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init
    """,
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
}
KNOWN = {section: keys.split() for section, keys in _KEYS.items()}

# Keys that change nothing in what we do with DeepSpeed, with what does that here.
WITHOUT_EFFECT = {
    "steps_per_print": "log.every",
    "wall_clock_breakdown": "profile",
    "memory_breakdown": "profile",
    "flops_profiler": "metrics.jsonl has the FLOPs",
    "dump_state": "startup.json",
    "dataloader_drop_last": "the loader is ours",
    "checkpoint": "checkpoint",
    "tensorboard": "log.tensorboard",
    "csv_monitor": "metrics.jsonl",
    "bf16.check_grad_overflow": "the gradient norm shows overflows",
    "bf16.immediate_grad_update": "gradients are applied once per step",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold float32 weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "checkpoints hold float32 weights",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "checkpoints hold float32 weights",
}
# Sections without effect if all their values are "auto": the run config is the source of these settings.
_OF_RUN_CONFIG = {"optimizer": "optim", "scheduler": "schedule"}
# Parameters that choose an implementation of AdamW, which `optim.name` and `optim.fused` do here.
_ADAM_VARIANTS = {"torch_adam": True, "adam_w_mode": True}

_DATA_PARALLEL = "the engines are data parallel; zero_optimization.stage 3 shards what does not fit"
_INSTEAD = {
    "activation_checkpointing": "use memory.activation_checkpointing in the run config",
    "amp": "use precision in the run config",
    "torch_autocast": "use precision in the run config",
    "bfloat16": 'use "bf16": {"enabled": "auto"}',
    "curriculum_learning": "use train.batch_schedule or mode_schedule in the run config",
    "data_efficiency": "use train.batch_schedule or mode_schedule in the run config",
    "compile": "use compile.scope in the run config",
    "autotuning": "use train.auto_micro_batch in the run config",
    "elasticity": "a run resumes with any number of processes",
    "tensor_parallel": _DATA_PARALLEL,
    "sequence_parallel_size": _DATA_PARALLEL,
    "expert_parallel": _DATA_PARALLEL,
    "pipeline": _DATA_PARALLEL,
    "wandb": "use log.tensorboard in the run config",
    "comet": "use log.tensorboard in the run config",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "use zero_hpz_partition_size",
    "zero_optimization.cpu_offload": 'use "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'use "offload_param": {"device": "cpu"}',
}


def check_keys(config: Mapping[str, Any], path: str) -> None:
    """Check that DeepSpeed follows every key of its file, as far as that follows from the file alone.

    A `ConfigError` names all other keys, and sections that are none, and what to do.
    """
    problems = _problems(config, "")
    if problems:
        raise ConfigError(f"{path}: " + "; ".join(problems))


def without_unused_keys(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a checked config without the keys that have no effect, and these with what is used instead."""
    return _used(config, "")


def _used(section: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    used: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in section.items():
        name = f"{prefix}{key}"
        instead = WITHOUT_EFFECT.get(name) or _OF_RUN_CONFIG.get(name)
        if instead is None:
            if isinstance(value, Mapping):
                value, below = _used(value, f"{name}.")
                unused += below
            used[key] = value
        elif value not in (False, None, AUTO):
            unused.append(f"{name} ({instead})")
    return used, unused


def _problems(section: Mapping[str, Any], prefix: str) -> list[str]:
    known, problems = KNOWN[prefix.rstrip(".")], []
    for key, value in section.items():
        name = f"{prefix}{key}"
        if name in WITHOUT_EFFECT:
            continue
        if name in _OF_RUN_CONFIG:
            problems += _section_problems(name, value)
        elif key in known and name in KNOWN:
            if isinstance(value, Mapping):
                problems += _problems(value, f"{name}.")
            elif value is not None or not prefix:  # null below zero_optimization is DeepSpeed's default
                problems.append(f"{name}: expected keys below it, found {short_repr(value)}{_edit(name)}")
        elif key not in known:
            problems.append(f"{display_name(name)}: {_advice(name, str(key), known)}")
    return problems


def _edit(name: str) -> str:
    return f'; write "{name}": {{"enabled": "auto"}}' if name in ("bf16", "fp16") else ""


def _advice(name: str, key: str, known: list[str]) -> str:
    if name in _INSTEAD:
        return f"expected nothing, found it; remove it: {_INSTEAD[name]}"
    prefix = name[: len(name) - len(key)]
    names = [*known, *(other[len(prefix) :] for other in (*WITHOUT_EFFECT, *_INSTEAD) if other.startswith(prefix))]
    close = difflib.get_close_matches(key[:100], [*names, *(_OF_RUN_CONFIG if not prefix else ())], n=1)
    return f"unknown or unsupported key, {f'did you mean {close[0]!r}?' if close else 'remove it'}"


def _section_problems(name: str, section: Any) -> list[str]:
    """Return what an optimizer or scheduler section sets to a value: the run config is the source of all of them."""
    source = _OF_RUN_CONFIG[name]
    if not isinstance(section, Mapping):
        return [f"{name}: expected nothing, found {short_repr(section)}; remove it: the run config's {source} is used"]
    parameters = section.get("params", {})
    parameters = parameters if isinstance(parameters, Mapping) else {"params": parameters}
    values = {f"params.{key}": value for key, value in parameters.items()}
    values |= {key: value for key, value in section.items() if key not in ("type", "params")}
    if name == "optimizer":
        values = {key: value for key, value in values.items() if _ADAM_VARIANTS.get(key[len("params.") :]) is not value}
        if section.get("type", "AdamW") not in ("Adam", "AdamW"):
            values["type"] = section["type"]
    found = [f"{key} {short_repr(value)}" for key, value in values.items() if value != AUTO]
    if not found:
        return []
    return [
        f"{name}: expected nothing or only {AUTO!r} (the run config's {source} is the source), found "
        f"{', '.join(found)}; remove the section"
    ]
