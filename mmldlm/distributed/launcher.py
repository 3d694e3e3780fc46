"""The launch that the launcher requested: its environment, and the config files that it names. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.distributed.accelerate_deepspeed import deepspeed_launch
from mmldlm.distributed.accelerate_env import check_variables, is_true, launcher_variables
from mmldlm.distributed.deepspeed_config import engine_name, offloads_optimizer
from mmldlm.distributed.parallelism import check_parallelism_section, read_replicas, read_secondary_partition
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
    mixed_precision: str = "no"  # the launcher's: no, bf16 or fp16
    notices: tuple[str, ...] = ()  # about settings of the launcher that have no effect
    replicas: int = 1  # of the model, each sharded over world_size / replicas processes; above 1 under hybrid sharding
    secondary_partition: int = 1  # processes that share a second copy of ZeRO-3's weights; 1 for none
    nodes: int = 1

    @property
    def sharding(self) -> str:
        """How the engine's sharding differs from its usual one, for the user; "" if it does not."""
        if self.replicas > 1:
            return f"{self.replicas} replicas x {self.world_size // self.replicas} shards"
        return f"secondary partition of {self.secondary_partition}" if self.secondary_partition > 1 else ""

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
    """Return the launch that `environment` describes; the accelerate file adds to it.

    Both files, the values of `--deepspeed_config` and `--accelerate_config`, are for launchers that set no ACCELERATE_
    variables (torchrun, deepspeed).

    Raises:
        ConfigError: The launch would not train as it seems to (separate copies of the model, FSDP 1), or two sources
            contradict each other.
    """
    launcher = _launcher_name(environment)
    if accelerate_file:
        _apply_accelerate_file(Path(accelerate_file), environment)
    if "MASTER_ADDR" in environment and "LOCAL_RANK" not in environment:
        raise ConfigError(
            "launcher: MASTER_ADDR is set but LOCAL_RANK is not: every process would train its own copy; "
            "use `distributed_type: MULTI_GPU` without `use_cpu` in the accelerate config, or torchrun, or for one "
            "process `num_processes: 1`"
        )
    notices = check_variables(environment)
    world_size = _read_int(environment, "WORLD_SIZE", 1)
    launched = "RANK" in environment and "LOCAL_RANK" in environment
    if world_size > 1 and not launched:
        raise ConfigError(f"launcher: WORLD_SIZE is {world_size}, but RANK and LOCAL_RANK are not set")
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if launched and missing:
        raise ConfigError(f"launcher: RANK and LOCAL_RANK are set, but {' and '.join(missing)} not; expected all five")
    if (rank := _read_int(environment, "RANK", 0)) >= world_size:
        raise ConfigError(f"launcher: RANK: expected less than WORLD_SIZE, which is {world_size}, found {rank}")
    # The engine. accelerate launch and `_apply_accelerate_file` set these variables; a launch without them is DDP.
    use_fsdp, use_deepspeed = (is_true(environment, f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
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
    if use_deepspeed or deepspeed_file:
        deepspeed, deepspeed_file, more_notices = deepspeed_launch(environment, deepspeed_file or "")
        notices += more_notices
        engine = engine_name(deepspeed, deepspeed_file)
    if not launched and (use_fsdp or deepspeed is not None):
        raise ConfigError(
            f"launcher: {'fsdp2' if use_fsdp else engine} is requested, but no process group is described; start it "
            "with accelerate launch, torchrun or deepspeed (and without `use_cpu` in the accelerate config)"
        )
    replicas = read_replicas(environment, engine == FSDP2, world_size)
    if launcher == "deepspeed":  # whose name for it is another; the loader's workers are by this one
        environment.setdefault("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", str(world_size)))
    local_world_size, secondary = _read_int(environment, "LOCAL_WORLD_SIZE", world_size) or 1, 1
    if deepspeed is not None:
        secondary = read_secondary_partition(deepspeed, deepspeed_file, world_size, local_world_size)
    nodes = "CROSS_SIZE" if launcher == "deepspeed" else "GROUP_WORLD_SIZE"  # torchrun's
    return LauncherEnv(
        engine=engine,
        launcher=launcher,
        rank=rank,
        local_rank=_read_int(environment, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=local_world_size,
        master=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}" if launched else "",
        deepspeed=deepspeed,
        deepspeed_file=deepspeed_file,
        mixed_precision=_read_precision(environment),
        notices=notices,
        replicas=replicas,
        secondary_partition=secondary,
        nodes=_read_int(environment, nodes, -(-world_size // local_world_size)),
    )


def read_launcher_sizes(environment: Mapping[str, str], accelerate_file: str | None = None) -> tuple[int, int, str]:
    """Return what an estimate needs of the launch: its processes, FSDP2's replicas and its `mixed_precision`.

    Errors are those of `read_launcher_env`.
    """
    environment = dict(environment)
    if accelerate_file:
        _apply_accelerate_file(Path(accelerate_file), environment)
    world_size = _read_int(environment, "WORLD_SIZE", 1)
    replicas = read_replicas(environment, is_true(environment, "ACCELERATE_USE_FSDP"), world_size)
    return world_size, replicas, _read_precision(environment)


def _read_precision(environment: Mapping[str, str]) -> str:
    """Return the launcher's `mixed_precision`: no, bf16 or fp16."""
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        raise ConfigError(f"mixed_precision: expected no, bf16 or fp16 in the launcher's config, found {precision}")
    return precision


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


def _apply_accelerate_file(path: Path, environment: MutableMapping[str, str]) -> None:
    """Set the variables that `accelerate launch --config_file` would set; the file decides engine and precision."""
    tree = read_yaml(path)
    kind = tree.get("distributed_type", "NO") or "NO"  # without quotes, YAML reads NO as false
    if environment.get("ACCELERATE_MIXED_PRECISION"):
        raise ConfigError(f"--accelerate_config: {path}, but accelerate launch has its own --config_file; set only one")
    if kind not in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        raise ConfigError(f"{path}: distributed_type: expected NO, MULTI_GPU, FSDP or DEEPSPEED, found {kind}")
    for key, section in tree.items():
        if str(key).endswith("_config") and not isinstance(section or {}, Mapping):
            raise ConfigError(f"{path}: {key}: expected keys below it, found {short_repr(section)}")
    world_size = _read_int(environment, "WORLD_SIZE", 1)
    if kind == "NO" and world_size > 1:
        raise ConfigError(
            f"{path}: distributed_type: expected MULTI_GPU, FSDP or DEEPSPEED for {world_size} processes, found NO"
        )
    check_parallelism_section(tree.get("parallelism_config") or {}, path)
    environment.update(launcher_variables(path, world_size))
