"""Run configs of the LGDLM trainer: keys that have a counterpart are renamed, the others listed.

docs/migration.md has a table of all keys, with what was read of them in LGDLM's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mmldlm.config import RunConfig
from mmldlm.errors import ConfigError
from mmldlm.settings.fields import build
from mmldlm.settings.yaml import parse_yaml, read_yaml
from mmldlm.utils.nested import flatten
from mmldlm.utils.printable import printable
from mmldlm.utils.short_repr import display_name, short_repr

# Keys and shell variables of LGDLM by the setting that they are here. Values stay the same, unless in `VALUES`.
OLD_NAMES = {
    "run.dir": "logging.run_name L2T_RUN_NAME",
    "run.seed": "training.seed",
    "mode": "training.loss_type loss.loss_type",
    "data.num_workers": "data.num_workers DATA_WORKERS",
    "data.prefetch_factor": "data.prefetch_factor",
    "data.persistent_workers": "data.persistent_workers",
    "model.width": "model.hidden_size",
    "model.depth": "model.n_blocks",
    "model.conditioning_width": "model.cond_dim",
    "memory.activation_checkpointing": "model.use_gradient_checkpointing training.use_gradient_checkpointing",
    "latent.process": "model.latent_beta_schedule",
    "latent.prediction": "model.latent_parameterization",
    "loss.latent_weight": "loss.latent_loss_weight LATENT_LOSS_WEIGHT",
    "train.steps": "training.num_train_steps L2T_STEPS L2T_BASE_STEPS",
    "train.micro_batch_size": "training.train_batch_size L2T_TRAIN_BS",
    "precision": "training.dtype DTYPE",
    "compile.scope": "training.compile_model L2T_COMPILE",
    "schedule.lr": "training.lr_schedule",
    "optim.warmup_steps": "training.warmup_steps WARMUP_STEPS",
    "optim.lr": "optimizer.lr LEARNING_RATE",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.betas": "optimizer.betas",
    "optim.eps": "optimizer.eps",
    "optim.clip_norm": "optimizer.grad_clip_norm GRAD_CLIP_NORM",
    "log.every": "logging.log_freq L2T_LOG_FREQ L2T_BASE_LOG_FREQ",
    "validation.every": "logging.eval_freq L2T_EVAL_FREQ L2T_BASE_EVAL_FREQ",
    "checkpoint.every_steps": "logging.save_freq L2T_SAVE_FREQ L2T_BASE_SAVE_FREQ",
    "distributed.timeout_s": "NCCL_TIMEOUT TORCH_DISTRIBUTED_TIMEOUT",
    "distributed.heartbeat_timeout_s": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "distributed.blocking_wait": "NCCL_BLOCKING_WAIT TORCH_NCCL_BLOCKING_WAIT",
    "distributed.async_error_handling": "NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
RENAMED = {old: setting for setting, names in OLD_NAMES.items() for old in names.split()}
# New values by old ones; a key with another value is not converted.
VALUES: dict[str, dict[Any, Any]] = {
    "memory.activation_checkpointing": {True: "full", False: "none"},
    "latent.process": {"cosine": "vp_cosine", "linear": "vp_linear", "sigmoid": "vp_sigmoid"},
    "latent.prediction": {"epsilon": "epsilon", "x0": "x0", "v_param": "v"},
    "precision": {
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
        **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    },
    "compile.scope": {True: "regional", False: "none"},
    "schedule.lr": {name: name for name in ("constant", "cosine", "linear")},
    "mode": {"unconditional": "joint", "l2t": "l2t", "t2l": "t2l"},
    "distributed.blocking_wait": {0: False, 1: True},
    "distributed.async_error_handling": {0: False, 1: True},
}


def convert_config(path: Path, assignments: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a run config of LGDLM. Files that its `defaults` name are read beside it, as by Hydra.

    Args:
        assignments: `key=value` and `VARIABLE=value` of the command that started the run; later ones win.

    Returns:
        The settings by dotted key, and the keys and variables that were not converted with their values.

    Raises:
        ConfigError: A file cannot be read, or a value is none of its setting.
    """
    old = _read(path)
    if not old:
        raise ConfigError(f"{display_name(str(path))}: expected keys of LGDLM, found none")
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        key = key.lstrip("+")  # Hydra's mark of a key that the file does not have
        old.pop(key, None)  # so that it comes after the file's keys
        old[key] = parse_yaml(text, key)
    settings: dict[str, Any] = {"run.dir": path.stem, "data.path": f"data/{path.stem}"}
    left = dict[str, Any]()
    for key, value in old.items():
        setting = RENAMED.get(key, f"distributed.nccl.{key}" if key.startswith("NCCL_") else "")
        new = _new_value(setting, value)
        if setting and new is not None:
            settings[setting] = new
        else:
            left[key] = value
    settings["run.dir"] = f"runs/{settings['run.dir']}"
    if "loss.latent_weight" in settings:
        settings["loss.latent"] = "mse"  # whose weight it was
    if isinstance(size := settings.get("train.micro_batch_size"), int):
        # LGDLM's launcher overwrote `training.world_size`.
        per_node = _count(old, "NPROC_PER_NODE" if "NPROC_PER_NODE" in old else "training.world_size")
        settings["train.global_batch_size"] = size * per_node * _count(old, "NNODES")
    try:
        build(RunConfig, nest(settings))
    except ConfigError as error:
        raise ConfigError(f"{display_name(str(path))}, converted: {error}") from None
    return settings, left


def _read(path: Path) -> dict[str, Any]:
    """Return the values of a YAML file and of the files that its `defaults` name, by dotted key."""
    tree = read_yaml(path)
    base: dict[str, Any] = {}
    defaults = tree.pop("defaults", None)
    for entry in defaults if isinstance(defaults, list) else ():
        for group, name in entry.items() if isinstance(entry, dict) else ():
            file = path.parent / str(group) / f"{name}.yaml"
            if file.is_file():
                base |= flatten({group: read_yaml(file)})
    return base | flatten(tree)


def _new_value(setting: str, value: Any) -> Any:
    """Return what a setting is for a value of LGDLM; None if it has no counterpart."""
    if setting == "distributed.heartbeat_timeout_s" and isinstance(value, int) and value > 86_400:
        return None  # more than a day: LGDLM's scripts had 138
    if isinstance(value, str) and "${" in value:  # a reference of Hydra's to another key
        return None
    values = VALUES.get(setting)
    if values is None:
        return value
    return values.get(value) if isinstance(value, str | int) else None


def _count(old: dict[str, Any], name: str) -> int:
    value = old.get(name, 1)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}: expected a whole number, at least 1, found {short_repr(value)}")
    return value


def nest(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, leaf = key.split(".")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
        group[leaf] = value
    return tree


def to_config_text(settings: dict[str, Any], left: dict[str, Any], source: Path) -> str:
    """Return the run config as YAML, with what was not converted in comments."""
    header = [f"# Converted from {source.name} of LGDLM. Not converted, see docs/migration.md:"]
    header += [f"#   {printable(f'{key}: {short_repr(value)}')}" for key, value in left.items()]
    return "\n".join([*header, yaml.safe_dump(nest(settings), sort_keys=False, allow_unicode=True)])
