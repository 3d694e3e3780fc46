"""Read the launch from the launcher's environment and the config files that it names, without starting it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from mmldlm.distributed.deepspeed_file import DeepSpeedFile, read_deepspeed
from mmldlm.distributed.library_calls import PREFIXES, library_call, require_deepspeed
from mmldlm.errors import ConfigError
from mmldlm.settings.yaml import read_yaml

SINGLE, DDP, FSDP2 = "single", "ddp", "fsdp2"
ENGINES = (DDP, FSDP2, "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")  # engines of several processes

# Accelerate sees only these of its variables, as the launcher set them, because the results of a run must follow from
# its run config and its engine.
PASSED_ON = ("ACCELERATE_CPU_AFFINITY", "ACCELERATE_USE_CPU", "FSDP_RESHARD_AFTER_FORWARD")
# Variables that a user may have counted on, and their replacement.
REFUSED = {
    "ACCELERATE_DYNAMO_BACKEND": "compile.scope: regional in the run config",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.global_batch_size and train.micro_batch_size in the run config",
    "ACCELERATE_GRADIENT_CLIPPING": "optim.clip_norm in the run config",
    "ACCELERATE_TORCH_DEVICE": "CUDA_VISIBLE_DEVICES in the environment",
    "ACCELERATE_USE_MEGATRON_LM": "distributed_type: FSDP or DEEPSPEED",
    "ACCELERATE_USE_SAGEMAKER": "compute_environment: LOCAL_MACHINE",
    "FSDP_ACTIVATION_CHECKPOINTING": "memory.activation_checkpointing in the run config",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "memory.activation_checkpointing in the run config",
    "FSDP_IGNORED_MODULES": "nothing: all weights are sharded",
    # Shards on the host are untested on a GPU. Without a GPU, PyTorch cannot pin them.
    "FSDP_OFFLOAD_PARAMS": "accelerate_configs/zero3_offload.yaml, which keeps weights and optimizer on the host",
}
_OF_DEEPSPEED = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING")  # DeepSpeed has its own
_OFF = ("false", "0", "no", "n", "off", "f")
_ON = ("true", "1", "yes", "y", "on", "t")
PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class LauncherEnv:
    """Engine, rank and world size of this process, as described by its launcher."""

    engine: str  # SINGLE or one of ENGINES
    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master: str  # host:port, "" in a single process
    deepspeed: DeepSpeedFile | None = None
    mixed_precision: str = "no"  # the launcher's: no, bf16 or fp16
    replicas: int = 1  # of the model, each sharded over world_size / replicas processes (hybrid sharding if above 1)
    nodes: int = 1
    accelerate: Mapping[str, str] = field(default_factory=dict)  # the variables that Accelerate may see

    @property
    def sharding(self) -> str:
        """How this engine shards differently from its default, for the user, or an empty string."""
        if self.replicas > 1:
            return f"{self.replicas} replicas x {self.world_size // self.replicas} shards"
        return f"secondary partition of {self.secondary_partition}" if self.secondary_partition > 1 else ""

    @property
    def secondary_partition(self) -> int:
        """Number of processes that share a second copy of ZeRO-3's weights, 1 for none."""
        return 1 if self.deepspeed is None else self.deepspeed.secondary_partition

    @property
    def source(self) -> str:
        """Name of the engine's description for messages: the DeepSpeed file if there is one."""
        return f"engine {self.engine}" if self.deepspeed is None else self.deepspeed.name

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines for the user about the launcher's settings."""
        return () if self.deepspeed is None else self.deepspeed.notices

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer steps on the host."""
        return self.deepspeed is not None and self.deepspeed.device("offload_optimizer") != "none"


def read_launcher_env(
    environment: MutableMapping[str, str],
    deepspeed_file: str | None = None,
    accelerate_file: str | None = None,
) -> LauncherEnv:
    """Return the launch that `environment` describes, completed by the accelerate file.

    The two files are the values of `--deepspeed_config` and `--accelerate_config`. They serve launchers that set no
    ACCELERATE_ variables (torchrun, deepspeed). If the launch would not train as it seems to (separate copies of the
    model, FSDP 1), or if two sources contradict each other, this is a `ConfigError`.
    """
    launcher = _launcher_name(environment)
    variables = {**environment, **(_file_variables(accelerate_file, environment) if accelerate_file else {})}
    launched, world_size = {"RANK", "LOCAL_RANK"} <= variables.keys(), _read_int(variables, "WORLD_SIZE", 1)
    use_fsdp, use_deepspeed = (_is_true(variables, f"ACCELERATE_USE_{name}") for name in ("FSDP", "DEEPSPEED"))
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")
    file = "" if file == "none" else file  # Accelerate's word for no file
    if deepspeed_file and file:
        raise ConfigError(f"--deepspeed_config: {deepspeed_file} here, {file} in the accelerate config; set only one")
    file = deepspeed_file or file
    use_deepspeed = use_deepspeed or bool(file)
    if use_fsdp and use_deepspeed:
        raise ConfigError("engine: both FSDP and DeepSpeed are requested; choose one")
    # mpirun sets these: Open MPI the first, MPICH and Intel the second.
    processes = max(world_size, *(_read_int(variables, name, 1) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")))
    if not launched and (use_fsdp or use_deepspeed or processes > 1 or "MASTER_ADDR" in variables):
        requested = "FSDP" if use_fsdp else "DeepSpeed" if use_deepspeed else "a process group"
        raise ConfigError(
            f"launcher: {requested} is requested, but RANK and LOCAL_RANK are not set: every process would train its "
            "own copy; use accelerate launch (with `distributed_type: MULTI_GPU` for DDP, without `use_cpu`), torchrun "
            "or deepspeed, or `num_processes: 1`"
        )
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if launched and missing:
        raise ConfigError(f"launcher: RANK and LOCAL_RANK are set, but {' and '.join(missing)} not; expected all five")
    _check_variables(variables, use_fsdp, use_deepspeed, launched)
    if launcher == "deepspeed":  # deepspeed uses another name, but the loader counts its workers by this one
        environment.setdefault("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", str(world_size)))
        variables["LOCAL_WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"]
    local_world_size = _read_int(variables, "LOCAL_WORLD_SIZE", world_size) or 1
    engine, deepspeed = SINGLE if not launched else FSDP2 if use_fsdp else DDP, None
    if use_deepspeed:
        require_deepspeed(file or "engine: a ZeRO engine")
        accelerates = {name: value for name, value in variables.items() if name.startswith(PREFIXES)}
        deepspeed = read_deepspeed(file, accelerates, world_size, local_world_size)
        engine = deepspeed.engine
    precision = _read_precision(variables)
    if deepspeed is not None and precision == "no":  # Accelerate's default beside a DeepSpeed file
        precision = deepspeed.precision
    nodes = "CROSS_SIZE" if launcher == "deepspeed" else "GROUP_WORLD_SIZE"  # torchrun's
    return LauncherEnv(
        engine=engine,
        launcher=launcher,
        rank=_read_int(variables, "RANK", 0),
        local_rank=_read_int(variables, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=local_world_size,
        master=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}" if launched else "",
        deepspeed=deepspeed,
        mixed_precision=precision,
        replicas=_read_replicas(variables, use_fsdp, world_size),
        nodes=_read_int(variables, nodes, -(-world_size // local_world_size)),
        accelerate={name: variables[name] for name in PASSED_ON if name in variables},
    )


def read_launcher_sizes(environment: Mapping[str, str], accelerate_file: str | None = None) -> tuple[int, int, str]:
    """Return the number of processes, FSDP2's replicas and `mixed_precision` of the launch, for an estimate."""
    variables = {**environment, **(_file_variables(accelerate_file, environment) if accelerate_file else {})}
    world_size = _read_int(variables, "WORLD_SIZE", 1)
    replicas = _read_replicas(variables, _is_true(variables, "ACCELERATE_USE_FSDP"), world_size)
    return world_size, replicas, _read_precision(variables)


def _launcher_name(environment: Mapping[str, str]) -> str:
    if "ACCELERATE_MIXED_PRECISION" in environment:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in environment else "python"


def _file_variables(path: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file path` sets, computed by Accelerate's own code."""
    if environment.get("ACCELERATE_MIXED_PRECISION"):
        raise ConfigError(f"--accelerate_config: {path}, but accelerate launch has its own --config_file; set only one")
    tree, world_size = read_yaml(Path(path)), _read_int(environment, "WORLD_SIZE", 1)
    # YAML reads an unquoted no as false.
    kind, precision = tree.get("distributed_type") or "NO", tree.get("mixed_precision", "no")
    if kind not in ("MULTI_GPU", "FSDP", "DEEPSPEED") and (kind != "NO" or world_size > 1):
        raise ConfigError(
            f"{path}: distributed_type: expected MULTI_GPU, FSDP or DEEPSPEED for {world_size} processes"
            f"{', or NO' if world_size == 1 else ''}, found {kind}"
        )
    if precision not in PRECISIONS:
        raise ConfigError(f'{path}: mixed_precision: expected "no" in quotes, bf16 or fp16, found {precision}')
    with library_call(path, {}):
        from accelerate.commands import launch
        from accelerate.utils import launch as environments

        # Nothing is launched. One machine and any free port keep Accelerate from looking for other machines.
        given = {"config_file": path, "num_processes": world_size, "num_machines": 1, "main_process_port": 0}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        parser = launch.launch_command_parser()
        args, file, precision_from_file = launch._validate_launch_command(
            parser.parse_args([*words, "-m", "mmldlm.train"])
        )
        of_kind = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
        if unused := [section for section, one in of_kind.items() if kind != one and getattr(file, section, None)]:
            raise ConfigError(f"{path}: {' and '.join(unused)}: no effect under distributed_type: {kind}; remove it")
        # Accelerate accepts any key in a section and ignores unknown ones.
        options = {action.dest for action in parser._actions}
        for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
            for key in getattr(file, section) or {}:
                if not {key, f"fsdp_{key}"} & options:
                    raise ConfigError(f"{path}: {section}: unknown key {key!r}")
        if args.use_deepspeed:
            fields = [*file.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, variables = environments.prepare_deepspeed_cmd_env(args)
        elif args.use_fsdp or args.multi_gpu:
            variables = environments.prepare_multi_gpu_env(args)
        else:
            _, variables = environments.prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in variables.items() if name.startswith(PREFIXES)}


def _check_variables(variables: Mapping[str, str], use_fsdp: bool, use_deepspeed: bool, launched: bool) -> None:
    """Raise a `ConfigError` that names all variables of Accelerate that make a user expect another computation."""
    problems = []
    if use_fsdp and (version := variables.get("FSDP_VERSION", "1")) != "2":
        problems.append(f"fsdp_version: expected 2, found {version}")
    for name, value in variables.items():
        key, value = name.removeprefix("ACCELERATE_").lower(), value.lower()
        if not value or (name.startswith("FSDP_") and not use_fsdp) or (name in _OF_DEEPSPEED and use_deepspeed):
            continue
        if name in PASSED_ON and value not in (*_ON, *_OFF):
            problems.append(f"{key}: expected true or false, found {value}")
        elif name == "ACCELERATE_USE_CPU" and value in _ON and launched:
            problems.append(f"{key}: expected false, found {value}: without GPUs several processes use the CPU")
        elif name in REFUSED and value not in (*_OFF, "none", "auto", *(["1"] if key.endswith("_steps") else [])):
            problems.append(f"{key}: expected nothing, found {value}; use {REFUSED[name]}")
    if problems:
        raise ConfigError("launcher: " + "; ".join(problems))


def _read_replicas(variables: Mapping[str, str], use_fsdp: bool, world_size: int) -> int:
    """Return the number of replicas of the model, 1 without hybrid sharding.

    `parallelism_config` may set replicas and shards of FSDP2. Any other size is a `ConfigError`.
    """
    names = [name for name in variables if name.startswith("PARALLELISM_CONFIG_") and name.endswith("_SIZE")]
    sizes = {name.lower(): _read_int(variables, name, 1) for name in names}
    replicas, shards = (sizes.pop(f"parallelism_config_dp_{name}_size", 1) for name in ("replicate", "shard"))
    for name, size in sizes.items():
        if size != 1:
            raise ConfigError(f"{name}: expected 1, found {size}: only replicas and shards of FSDP2 run here")
    found = f"parallelism_config_dp_replicate_size {replicas} x parallelism_config_dp_shard_size {shards}"
    switched_on = _is_true(variables, "ACCELERATE_USE_PARALLELISM_CONFIG")
    if (replicas, shards) == (1, 1) and not (use_fsdp and switched_on):
        return 1
    if not (use_fsdp and switched_on):
        raise ConfigError(
            f"{found}: expected distributed_type: FSDP with fsdp_version: 2 and ACCELERATE_USE_PARALLELISM_CONFIG=true "
            "for them, or no section (DDP replicates over all processes, ZeRO-3 shards; it has zero_hpz_partition_size)"
        )
    if replicas * shards != world_size or shards < min(world_size, 2):
        raise ConfigError(f"{found}: expected a product of {world_size}, the number of processes, and several shards")
    return replicas


def _read_precision(variables: Mapping[str, str]) -> str:
    precision = variables.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in PRECISIONS:
        raise ConfigError(f"mixed_precision: expected no, bf16 or fp16 in the launcher's config, found {precision}")
    return precision


def _read_int(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"launcher: {name}: expected a whole number, found {text!r}")
    return int(text)


def _is_true(variables: Mapping[str, str], name: str) -> bool:
    """Return whether a variable is true, as Accelerate spells it."""
    return variables.get(name, "false").lower() == "true"
