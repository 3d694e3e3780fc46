"""The section `deepspeed_config` of an accelerate file, as a DeepSpeed config.

`accelerate launch` passes the section to its processes as environment variables, and so does `--accelerate_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.distributed.deepspeed_config import read_deepspeed_config
from mmldlm.distributed.deepspeed_keys import AUTO, QUANTIZED, WITHOUT_EFFECT, check_keys, without_unused_keys
from mmldlm.errors import ConfigError
from mmldlm.utils.nested import flatten
from mmldlm.utils.short_repr import display_name, short_repr

SOURCE = "deepspeed_config of the accelerate config"  # in place of a DeepSpeed file in messages
ZERO_INIT = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"

_FIELDS = {  # key of the section -> its variable, and the key of DeepSpeed's config
    "zero_stage": ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_optimization.stage"),
    "offload_optimizer_device": (
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
        "zero_optimization.offload_optimizer.device",
    ),
    "offload_param_device": ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "zero_optimization.offload_param.device"),
    "offload_optimizer_nvme_path": (
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "zero_optimization.offload_optimizer.nvme_path",
    ),
    "offload_param_nvme_path": (
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
        "zero_optimization.offload_param.nvme_path",
    ),
    "zero3_save_16bit_model": (
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
    "gradient_accumulation_steps": ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps"),
    "gradient_clipping": ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping"),
}
_MOE = "deepspeed_moe_layer_cls_names"
_VARIABLES = {
    **{key: variable for key, (variable, _) in _FIELDS.items()},
    "deepspeed_config_file": FILE,
    "zero3_init_flag": ZERO_INIT,
    _MOE: "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_OF_LAUNCHER = (  # read by `accelerate launch` alone
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "mixed_precision",  # which it adds to the names of the section's keys
)
# What the section leaves open, as in the files in ds_configs/.
_DEFAULTS = {
    "communication_data_type": "fp32",
    "zero_optimization": {"reduce_bucket_size": 100_000_000, "allgather_bucket_size": 100_000_000},
}


def deepspeed_launch(environment: Mapping[str, str], file: str) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Return the DeepSpeed config of a launch with its "auto" values, its name in messages, and notices for the user.

    Raises:
        ConfigError: There is no config, a key is not supported, or file and section contradict each other.
    """
    fields = _read_section(environment)
    if file:
        config, source = read_deepspeed_config(Path(file)), file
    elif "zero_stage" in fields:
        config, source = json.loads(json.dumps(_DEFAULTS)), SOURCE
    else:
        raise ConfigError(
            "deepspeed_config_file: expected a DeepSpeed file in the accelerate config, such as "
            "ds_configs/zero2.json, or zero_stage there, found neither"
        )
    check_keys(config, source)
    for key, value in fields.items():
        *parents, leaf = _FIELDS[key][1].split(".")
        section = config
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
        current = section.get(leaf, AUTO)
        if current == AUTO:
            section[leaf] = value
        elif current != value and _FIELDS[key][1] not in WITHOUT_EFFECT:
            raise ConfigError(
                f"{SOURCE}: {key}: expected nothing or {json.dumps(current)} as in {file}, found {json.dumps(value)}; "
                "remove it"
            )
    used, unused = without_unused_keys(config)
    if environment.get(ZERO_INIT, "false").lower() == "true":
        unused.append("zero3_init_flag (for models of the transformers package)")
    notices = [f"{source}: no effect: {', '.join(unused)}"] if unused else []
    for name in QUANTIZED:
        if flatten(used).get(name):
            notices.append(f"{source}: {name}: the curve differs from that of the other engines")
    return used, source, tuple(notices)


def _read_section(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the section's values that are keys of DeepSpeed's config, by key of the section."""
    for name in filter(None, environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")):
        if name not in (*_VARIABLES, *_OF_LAUNCHER):
            raise ConfigError(f"{SOURCE}: {display_name(name)}: unknown key; expected {', '.join(_VARIABLES)}")
    if environment.get(_VARIABLES[_MOE]):
        raise ConfigError(
            f"{SOURCE}: {_MOE}: expected nothing (the model has no such layers), found "
            f"{short_repr(environment[_VARIABLES[_MOE]])}; remove it"
        )
    texts = {key: environment[variable] for key, (variable, _) in _FIELDS.items() if variable in environment}
    # "none" is accelerate's default of the paths.
    return {key: _parse(text) for key, text in texts.items() if not (key.endswith("_path") and text == "none")}


def _parse(text: str) -> Any:
    """Return the number or truth value that `text` is, otherwise `text`."""
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text
