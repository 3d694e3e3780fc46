"""Environment variables of Accelerate: which ones a launch may set, and what happens to the others.

Accelerate reads many variables, most of which its launcher sets from the accelerate config. But what a run computes
follows from its run config and its engine. So each variable is honored, ignored, or refused unless it has a value that
changes nothing, and Accelerate itself sees only `PASSED_ON`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mmldlm.errors import ConfigError

PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")

# Accelerate reads them as the launcher set them; with their keys in the accelerate config.
BOOLEANS = {
    "ACCELERATE_CPU_AFFINITY": "enable_cpu_affinity",
    "ACCELERATE_USE_CPU": "use_cpu",
    "FSDP_RESHARD_AFTER_FORWARD": "fsdp_config.fsdp_reshard_after_forward",
}
_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
PASSED_ON = BOOLEANS.keys()
# Under DeepSpeed they belong to the DeepSpeed file, which is built and checked in `deepspeed_config`.
DEEPSPEED_VARIABLES = frozenset(
    {"ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"}
) | {
    f"ACCELERATE_DEEPSPEED_{name}"
    for name in (
        "CONFIG_FILE",
        "MOE_LAYER_CLS_NAMES",
        "OFFLOAD_OPTIMIZER_DEVICE",
        "OFFLOAD_OPTIMIZER_NVME_PATH",
        "OFFLOAD_PARAM_DEVICE",
        "OFFLOAD_PARAM_NVME_PATH",
        "ZERO3_INIT",
        "ZERO3_SAVE_16BIT_MODEL",
        "ZERO_STAGE",
    )
}


@dataclass(frozen=True)
class Variable:
    """A variable of a launch that is refused, or ignored with a notice, unless its value is neutral."""

    key: str  # of the accelerate config
    neutral: tuple[str, ...]  # values that change nothing, in lower case; an unset variable is neutral
    reason: str  # what to use instead if it is refused, why it has no effect if it is ignored


# Refused under every engine but, for `DEEPSPEED_VARIABLES`, DeepSpeed.
REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Variable(
        "gradient_accumulation_steps",
        ("1", "auto"),
        "train.global_batch_size and train.micro_batch_size in the run config",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": Variable(
        "gradient_clipping", ("auto", "none"), "optim.clip_norm in the run config"
    ),
    "ACCELERATE_DYNAMO_BACKEND": Variable(
        "dynamo_config.dynamo_backend", ("no",), "compile.scope: regional in the run config"
    ),
    "ACCELERATE_TORCH_DEVICE": Variable("ACCELERATE_TORCH_DEVICE", (), "CUDA_VISIBLE_DEVICES in the environment"),
    "ACCELERATE_USE_MEGATRON_LM": Variable("distributed_type: MEGATRON_LM", _FALSE, "FSDP or DEEPSPEED"),
    "ACCELERATE_USE_SAGEMAKER": Variable("compute_environment: AMAZON_SAGEMAKER", _FALSE, "LOCAL_MACHINE"),
}
REFUSED_UNDER_FSDP = {
    "FSDP_ACTIVATION_CHECKPOINTING": Variable(
        "fsdp_config.fsdp_activation_checkpointing", _FALSE, "memory.activation_checkpointing in the run config"
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": Variable(
        "fsdp_config.fsdp_activation_checkpointing_offload", _FALSE, "memory.activation_checkpointing in the run config"
    ),
    # Shards on the host are untested on a GPU, and without one PyTorch cannot pin them.
    "FSDP_OFFLOAD_PARAMS": Variable(
        "fsdp_config.fsdp_offload_params",
        _FALSE,
        "accelerate_configs/zero3_offload.yaml, which keeps weights and optimizer on the host",
    ),
    "FSDP_IGNORED_MODULES": Variable("fsdp_config.fsdp_ignored_modules", ("none",), "nothing: all weights are sharded"),
}
_FSDP1, _UNIT = "FSDP2 has no such option", "MMDiTBlock is the unit of sharding"
IGNORED = {"ACCELERATE_DEBUG_MODE": Variable("debug", _FALSE, "it checks collectives that are not used here")}
IGNORED_UNDER_FSDP = {
    "FSDP_AUTO_WRAP_POLICY": Variable("fsdp_config.fsdp_auto_wrap_policy", ("transformer_based_wrap",), _UNIT),
    "FSDP_BACKWARD_PREFETCH": Variable("fsdp_config.fsdp_backward_prefetch", ("no_prefetch",), _FSDP1),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": Variable(
        "fsdp_config.fsdp_cpu_ram_efficient_loading", _FALSE, "each rank computes or reads its own weights alone"
    ),
    "FSDP_FORWARD_PREFETCH": Variable("fsdp_config.fsdp_forward_prefetch", _FALSE, _FSDP1),
    "FSDP_MIN_NUM_PARAMS": Variable("fsdp_config.fsdp_min_num_params", ("100000000", "0"), _UNIT),
    "FSDP_SHARDING_STRATEGY": Variable(
        "fsdp_config.fsdp_sharding_strategy", ("full_shard", "1"), "under FSDP2 fsdp_reshard_after_forward decides"
    ),
    "FSDP_STATE_DICT_TYPE": Variable(
        "fsdp_config.fsdp_state_dict_type", (), "checkpoints have a format of their own (docs/checkpoints.md)"
    ),
    "FSDP_SYNC_MODULE_STATES": Variable(
        "fsdp_config.fsdp_sync_module_states", ("true",), "each rank computes or reads its own weights alone"
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": Variable("fsdp_config.fsdp_transformer_layer_cls_to_wrap", ("mmditblock",), _UNIT),
    "FSDP_USE_ORIG_PARAMS": Variable("fsdp_config.fsdp_use_orig_params", ("true",), _FSDP1),
}


def is_true(environment: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is set to true, as Accelerate spells it."""
    return environment.get(name, "false").lower() == "true"


def check_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Check the variables of Accelerate in `environment`; return notices about those that are ignored.

    A `ConfigError` names all that would change what the run computes, and what to use instead.
    """
    use_fsdp, use_deepspeed = (is_true(environment, f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    problems = []
    if use_fsdp and (version := environment.get("FSDP_VERSION", "1")) != "2":
        problems.append(f"fsdp_config.fsdp_version: expected 2, found {version}")
    refused = {**REFUSED, **(REFUSED_UNDER_FSDP if use_fsdp else {})}
    for name, variable in refused.items():
        if _deviates(environment, name, variable) and not (use_deepspeed and name in DEEPSPEED_VARIABLES):
            expected = " or ".join(variable.neutral[:1]) or "nothing"
            problems.append(f"{variable.key}: expected {expected}, found {environment[name]}; use {variable.reason}")
    for name, key in BOOLEANS.items():
        value = environment.get(name, "false").lower()
        if value not in (*_TRUE, *_FALSE) and (use_fsdp or not name.startswith("FSDP_")):
            problems.append(f"{key}: expected true or false, found {environment[name]}")
        elif value in _TRUE and name == "ACCELERATE_USE_CPU" and "LOCAL_RANK" in environment:
            problems.append(
                f"{key}: expected false for several processes, found {value}; without GPUs they use the CPU"
            )
    if problems:
        raise ConfigError("launcher: " + "; ".join(problems))
    ignored = {**IGNORED, **(IGNORED_UNDER_FSDP if use_fsdp else {})}
    return tuple(
        f"{variable.key}: {environment[name]} has no effect: {variable.reason}"
        for name, variable in ignored.items()
        if _deviates(environment, name, variable)
    )


def _deviates(environment: Mapping[str, str], name: str, variable: Variable) -> bool:
    return environment.get(name, "") != "" and environment[name].lower() not in variable.neutral


@contextmanager
def only_passed_on() -> Iterator[None]:
    """Hide all variables of Accelerate but `PASSED_ON` from it; at the end they are as they were."""
    hidden = _pop_hidden()
    try:
        yield
    finally:
        _pop_hidden()  # Accelerate itself selects the engine for later starts in this process
        os.environ.update(hidden)


def _pop_hidden() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(PREFIXES) and name not in PASSED_ON]
    return {name: os.environ.pop(name) for name in names}


def launcher_variables(path: Path, world_size: int) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file path` sets, by the code of Accelerate's launcher.

    `world_size` takes precedence over the file's. A file that Accelerate refuses is a `ConfigError`.
    """
    with only_passed_on():
        from accelerate.commands import launch
        from accelerate.utils import launch as environments

        # Nothing is launched: one machine and any free port keep Accelerate from looking for the others.
        options = {"config_file": path, "num_processes": world_size, "num_machines": 1, "main_process_port": 0}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        try:
            args, file, precision_from_file = launch._validate_launch_command(
                launch.launch_command_parser().parse_args([*words, "-m", "mmldlm.train"])
            )
            if args.use_deepspeed:
                fields = [*file.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
                args.deepspeed_fields_from_accelerate_config = ",".join(fields)
                _, variables = environments.prepare_deepspeed_cmd_env(args)
            elif args.use_fsdp or args.multi_gpu:
                variables = environments.prepare_multi_gpu_env(args)
            else:
                _, variables = environments.prepare_simple_launcher_cmd_env(args)
        except Exception as error:  # Accelerate has no class of its own for faults of the file
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path}: {reason} ({type(error).__name__} of Accelerate)") from None
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(PREFIXES) and os.environ.get(name) != value
        }
