"""The launch that the launcher requested: its environment, and the config files that it names. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.distributed.accelerate_deepspeed import deepspeed_launch, export_section
from mmldlm.distributed.deepspeed_config import engine_name, offloads_optimizer
from mmldlm.errors import ConfigError
from mmldlm.settings.yaml import read_yaml
from mmldlm.utils.short_repr import short_repr

SINGLE, DDP, FSDP2 = "single", "ddp", "fsdp2"
ENGINES = (DDP, FSDP2, "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")  # of several processes


@dataclass(frozen=True)
class LauncherEnv:
    """Engine, rank and world size of this process, as its launcher describes them."""

    engine: str  # SINGLE or one of ENGINES
    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: str  # host:port, "" in a single process
    deepspeed: Mapping[str, Any] | None = None  # content of the DeepSpeed file, unresolved
    deepspeed_file: str = ""  # or the section of the accelerate file that takes its place
    notices: tuple[str, ...] = ()  # about settings of the launcher that have no effect

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // max(1, self.local_world_size))

    @property
    def source(self) -> str:
        """Name of what describes the engine, for messages: the DeepSpeed file if there is one."""
        return self.deepspeed_file or f"engine {self.engine}"

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer steps on the host."""
        return self.deepspeed is not None and offloads_optimizer(self.deepspeed)


def read_launcher_env(
    environment: MutableMapping[str, str],
    deepspeed_file: str | None = None,
    accelerate_file: str | None = None,
) -> LauncherEnv:
    """Return the launch that `environment` describes.

    Args:
        environment: Environment variables; `accelerate_file` adds to them.
        deepspeed_file: Value of `--deepspeed_config`.
        accelerate_file: Value of `--accelerate_config`. Both are for launchers that set no ACCELERATE_ variables
            (torchrun, deepspeed).

    Raises:
        ConfigError: The launch would not train as it seems to (separate copies of the model, FSDP 1), or two sources
            contradict each other.
    """
    if accelerate_file:
        _apply_accelerate_file(Path(accelerate_file), environment)
    if "MASTER_ADDR" in environment and "LOCAL_RANK" not in environment:
        raise ConfigError(
            "launcher: MASTER_ADDR is set but LOCAL_RANK is not: every process would train its own copy; "
            "use `distributed_type: MULTI_GPU` without `use_cpu` in the accelerate config, or torchrun"
        )
    world_size = _read_int(environment, "WORLD_SIZE", 1)
    launched = "RANK" in environment and "LOCAL_RANK" in environment
    if world_size > 1 and not launched:
        raise ConfigError(f"launcher: WORLD_SIZE is {world_size}, but RANK and LOCAL_RANK are not set")
    # The engine. accelerate launch and `_apply_accelerate_file` set these variables; a launch without them is DDP.
    use_fsdp, use_deepspeed = (
        environment.get(name, "false").lower() == "true" for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    )
    launcher_file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    launcher_file = "" if launcher_file == "none" else launcher_file  # accelerate writes "none" for no file
    if deepspeed_file and launcher_file and Path(deepspeed_file).resolve() != Path(launcher_file).resolve():
        raise ConfigError(
            f"--deepspeed_config: {deepspeed_file} here, {launcher_file} in the accelerate config; set only one"
        )
    deepspeed_file = deepspeed_file or launcher_file
    if use_fsdp and (use_deepspeed or deepspeed_file):
        raise ConfigError("engine: both FSDP and DeepSpeed are requested; choose one")
    engine, deepspeed = SINGLE if not launched else FSDP2 if use_fsdp else DDP, None
    notices: tuple[str, ...] = ()
    if use_deepspeed or deepspeed_file:
        deepspeed, deepspeed_file, notices = deepspeed_launch(environment, deepspeed_file or "")
        engine = engine_name(deepspeed, deepspeed_file)
    if not launched and (use_fsdp or deepspeed is not None):
        raise ConfigError(
            f"launcher: {'fsdp2' if use_fsdp else engine} is requested, but no process group is described; start it "
            "with accelerate launch, torchrun or deepspeed (and without `use_cpu` in the accelerate config)"
        )
    if use_fsdp:
        _check_fsdp(environment)
    return LauncherEnv(
        engine=engine,
        launcher=_launcher_name(environment),
        rank=_read_int(environment, "RANK", 0),
        local_rank=_read_int(environment, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_read_int(environment, "LOCAL_WORLD_SIZE", world_size),
        master=f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}" if launched else "",
        deepspeed=deepspeed,
        deepspeed_file=deepspeed_file,
        notices=notices,
    )


def launcher_world_size() -> int:
    """Return the number of processes that the launcher started."""
    return _read_int(os.environ, "WORLD_SIZE", 1)


def _read_int(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"launcher: {name}: expected a whole number, found {text!r}")
    return int(text)


def _launcher_name(environment: Mapping[str, str]) -> str:
    if "ACCELERATE_MIXED_PRECISION" in environment:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environment else "python"


def _check_fsdp(environment: Mapping[str, str]) -> None:
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError(f"fsdp_config.fsdp_version: expected 2, found {version}")
    for name, instead in (
        ("ACTIVATION_CHECKPOINTING", "memory.activation_checkpointing in the run config"),
        ("CPU_RAM_EFFICIENT_LOADING", "nothing: each rank starts from the same seed"),
    ):
        if environment.get(f"FSDP_{name}", "false").lower() == "true":
            raise ConfigError(f"fsdp_config.fsdp_{name.lower()}: expected false, found true; use {instead}")


def _apply_accelerate_file(path: Path, environment: MutableMapping[str, str]) -> None:
    """Set the variables that `accelerate launch --config_file` would set; the file decides the engine."""
    tree = read_yaml(path)
    kind = str(tree.get("distributed_type", "NO")).upper()
    if environment.get("ACCELERATE_MIXED_PRECISION"):
        raise ConfigError(f"--accelerate_config: {path}, but accelerate launch has its own --config_file; set only one")
    if kind == "DEEPSPEED":
        export_section(_section(tree, "deepspeed_config", path), environment)
    elif kind == "FSDP":
        environment["ACCELERATE_USE_FSDP"] = "true"
        for key, value in _section(tree, "fsdp_config", path).items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            name = str(key).upper()
            # The variable of fsdp_transformer_layer_cls_to_wrap has another name than its key.
            environment["FSDP_TRANSFORMER_CLS_TO_WRAP" if "LAYER_CLS" in name else name] = text
    elif kind not in ("NO", "MULTI_GPU"):
        raise ConfigError(
            f"{path}: distributed_type: expected NO, MULTI_GPU, FSDP or DEEPSPEED, found {tree['distributed_type']}"
        )


def _section(tree: Mapping[str, Any], key: str, path: Path) -> Mapping[Any, Any]:
    section = tree.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{path}: {key}: expected keys below it, found {short_repr(section)}")
    return section
