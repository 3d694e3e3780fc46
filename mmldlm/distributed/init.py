"""Start-up of the engine, in one process or many, on CPU with gloo and on CUDA with NCCL."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

# Accelerate imports deepspeed, which would otherwise warn on every machine without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType

from mmldlm.distributed.accelerate_env import only_passed_on
from mmldlm.distributed.capabilities import ZERO_ENGINES
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.config import DDPConfig, DistributedConfig
from mmldlm.distributed.deepspeed_config import StepPlan, resolve_deepspeed_config
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.environment import export_settings
from mmldlm.distributed.grad_scaler import LossScale
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE, LauncherEnv
from mmldlm.distributed.process_group import join_process_group, published_failures
from mmldlm.distributed.setup_errors import library_errors_are_config_errors
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.errors import ConfigError

FSDP_BLOCK_CLASS = "MMDiTBlock"  # the unit of sharding


def start_engine(config: DistributedConfig, launch: LauncherEnv, plan: StepPlan) -> Engine:
    """Join the process group that the launcher describes and build the engine on it.

    It is a `ConfigError` if world size, rank or engine are not as the launcher requested.
    """
    deepspeed = deepspeed_config(launch, plan)
    export_settings(config)
    watchdog = join_process_group(config, launch) if launch.engine != SINGLE else None
    processes = Collectives(launch.rank, launch.world_size, watchdog)
    with published_failures(processes):
        _compare_launches(launch, processes)
        engine = build_engine(config, launch, plan, deepspeed, watchdog)
        _check_engine(engine)
    return engine


def deepspeed_config(launch: LauncherEnv, plan: StepPlan) -> dict[str, Any] | None:
    """Return the launch's DeepSpeed config with the run config's values, None without DeepSpeed.

    A value that contradicts the run config, or that DeepSpeed would not accept, is a `ConfigError`.
    """
    if launch.deepspeed is None:
        return None
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    config = resolve_deepspeed_config(
        launch.deepspeed, launch.deepspeed_file, plan, device_type, launch.secondary_partition
    )
    _check_types(config, launch.deepspeed_file)
    return config


def build_engine(
    config: DistributedConfig,
    launch: LauncherEnv,
    plan: StepPlan,
    deepspeed: dict[str, Any] | None,
    watchdog: Watchdog | None = None,
) -> Engine:
    """Build the engine on the process group of this process; `deepspeed` is the result of `deepspeed_config`."""
    with only_passed_on(), library_errors_are_config_errors(launch.source):
        accelerator = _build_accelerator(config, launch, plan, deepspeed)
    engine = _engine_class(launch.engine)(accelerator, launch, watchdog)
    if plan.precision == "fp16":
        engine.loss_scale = LossScale(engine.device)
    return engine


class _DeepSpeedPlugin(DeepSpeedPlugin):
    def set_deepspeed_weakref(self) -> None:
        """Do nothing: it configures the transformers package, which our models do not use."""


def _check_types(deepspeed: dict[str, Any], file: str) -> None:
    """Raise `ConfigError` if DeepSpeed would not accept a value, which it says only when it wraps the model."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for section, model in (("zero_optimization", DeepSpeedZeroConfig), ("bf16", DeepSpeedBF16Config)):
        with library_errors_are_config_errors(f"{file}: {section}"):
            model(**deepspeed[section])


def _build_accelerator(
    config: DistributedConfig, launch: LauncherEnv, plan: StepPlan, deepspeed: dict[str, Any] | None
) -> Accelerator:
    """Build Accelerate's object. Its precision stays "no", since the model uses autocast inside its forward."""
    on_cpu = not torch.cuda.is_available()
    AcceleratorState._reset_state(reset_partial_state=True)  # one process may train several runs in turn
    backend = {"backend": "gloo" if on_cpu else "nccl"}
    if deepspeed is not None:
        from deepspeed import ops

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ""  # we read, check and fill in the file
        os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
        # Only used for inference on CPU; compiling it at first use would take a minute and need g++.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState(cpu=False, **backend)
        return Accelerator(mixed_precision="no", deepspeed_plugin=_DeepSpeedPlugin(hf_ds_config=deepspeed))
    if launch.engine == FSDP2:
        from mmldlm.distributed.fsdp2 import fsdp_plugin

        state = PartialState(cpu=on_cpu, **backend)
        state.distributed_type = DistributedType.MULTI_GPU  # Accelerate knows no FSDP on CPU and would train DDP
        plugin = fsdp_plugin(plan.precision, FSDP_BLOCK_CLASS)
        parallelism = _hybrid_sharding(launch) if launch.replicas > 1 else None
        return Accelerator(cpu=on_cpu, mixed_precision="no", fsdp_plugin=plugin, parallelism_config=parallelism)
    return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[_ddp_handler(config.ddp)])


def _hybrid_sharding(launch: LauncherEnv) -> ParallelismConfig:
    return ParallelismConfig(
        dp_replicate_size=launch.replicas,
        dp_shard_size=launch.world_size // launch.replicas,
        tp_size=1,  # this and the rest, since Accelerate would read them from the environment
        cp_size=1,
        cp_backend="torch",
        sp_size=1,
        sp_backend="deepspeed",
    )


def _ddp_handler(config: DDPConfig) -> DistributedDataParallelKwargs:
    hook = {
        "none": DDPCommunicationHookType.NO,
        "fp16": DDPCommunicationHookType.FP16,
        "bf16": DDPCommunicationHookType.BF16,
    }[config.comm_hook]
    return DistributedDataParallelKwargs(
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        broadcast_buffers=config.broadcast_buffers,
        static_graph=config.static_graph,
        comm_hook=hook,
    )


def _engine_class(engine: str) -> type[Engine]:
    if engine == FSDP2:
        from mmldlm.distributed.fsdp2 import FSDP2Engine

        return FSDP2Engine
    if engine in ZERO_ENGINES:
        from mmldlm.distributed.zero import ZeroEngine

        return ZeroEngine
    return Engine


def _compare_launches(launch: LauncherEnv, processes: Collectives) -> None:
    """Raise `ConfigError` unless all ranks have the same engine (collective); others would wait for one another."""
    engines = processes.gather(f"{launch.engine} {launch.sharding}".strip(), "comparison of the engines")
    for rank, engine in enumerate(engines):
        if engine != engines[0]:
            raise ConfigError(
                f"the ranks were not started alike: rank {rank}: engine is {engine}, {engines[0]} on rank 0"
            )


def _check_engine(engine: Engine) -> None:
    """Check that Accelerate and torch.distributed started what the launcher requested, also by an all-reduce."""
    launch, state = engine.launch, engine.accelerator.state
    # Names of Accelerate's `DistributedType`.
    kinds = {SINGLE: "NO", FSDP2: "FSDP"}
    parallel = "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"
    kind = kinds.get(launch.engine, parallel if launch.engine == DDP else "DEEPSPEED")
    actual = {"engine": state.distributed_type.name, "world size": state.num_processes, "rank": state.process_index}
    expected = {"engine": kind, "world size": launch.world_size, "rank": launch.rank}
    if dist.is_initialized():
        actual |= {"torch's world size": dist.get_world_size(), "torch's rank": dist.get_rank()}
        expected |= {"torch's world size": launch.world_size, "torch's rank": launch.rank}
    for name, value in expected.items():
        if actual[name] != value:
            raise ConfigError(f"{name}: expected {value} (from the launcher), found {actual[name]} (in Accelerate)")
    if launch.engine != SINGLE and int(engine.sum(torch.ones(1), "all-reduce of ones")) != launch.world_size:
        raise ConfigError(
            f"world size: expected {launch.world_size} (from the launcher), found another sum in an all-reduce of ones"
        )
