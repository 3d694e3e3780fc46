"""One way to start, for one process and for many, on CPU with gloo and on CUDA with NCCL."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

# Accelerate imports deepspeed, which would warn of every machine without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType

from mmldlm.distributed.config import DDPConfig, DistributedConfig
from mmldlm.distributed.deepspeed_config import StepPlan, resolve_deepspeed_config
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.environment import export_settings
from mmldlm.distributed.grad_scaler import LossScale
from mmldlm.distributed.launcher import DDP, FSDP2, SINGLE, LauncherEnv
from mmldlm.distributed.process_group import join
from mmldlm.errors import ConfigError

WRAPPED = "MMDiTBlock"  # the unit of sharding


def start(config: DistributedConfig, launch: LauncherEnv, plan: StepPlan) -> Engine:
    """Join the process group that the launcher describes and build the engine's runtime on it.

    Raises `ConfigError` where what came is not what was asked for: another world size, rank or engine.
    """
    deepspeed = resolve_deepspeed_config(launch.deepspeed, launch.deepspeed_file, plan) if launch.deepspeed else None
    _check_mixed_precision(plan.precision)
    if launch.engine == DDP:
        _check_hook(config.ddp.comm_hook)
    export_settings(config)
    watchdog = None
    if launch.engine != SINGLE:
        watchdog = join(config, launch)
    accelerator = _accelerator(config, launch, plan, deepspeed)
    runtime = _runtime_class(launch.engine)(accelerator, launch, watchdog)
    if plan.precision == "fp16":
        runtime.loss_scale = LossScale(runtime.device)
    _check_came(runtime, launch)
    return runtime


class _DeepSpeedPlugin(DeepSpeedPlugin):
    def set_deepspeed_weakref(self) -> None:
        """Tells models of the transformers package how they are sharded; ours are none, and need not have it."""


def _accelerator(
    config: DistributedConfig, launch: LauncherEnv, plan: StepPlan, deepspeed: dict[str, Any] | None
) -> Accelerator:
    """Precision is the model's own matter (autocast inside its forward), so Accelerate's stays "no"."""
    on_cpu = not torch.cuda.is_available()
    AcceleratorState._reset_state(reset_partial_state=True)  # one process may train several runs, one after another
    backend = {"backend": "gloo" if on_cpu else "nccl"}
    if deepspeed is not None:
        from deepspeed import ops

        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ""  # the file is read, checked and filled by us
        os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
        # Of use to inference on CPUs alone, and it would be compiled at first use: a minute, and a need for g++.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        PartialState(cpu=False, **backend)
        return Accelerator(mixed_precision="no", deepspeed_plugin=_DeepSpeedPlugin(hf_ds_config=deepspeed))
    if launch.engine == FSDP2:
        from mmldlm.distributed.fsdp2 import fsdp_plugin

        state = PartialState(cpu=on_cpu, **backend)
        state.distributed_type = DistributedType.MULTI_GPU  # Accelerate knows no FSDP on CPU and would train DDP
        return Accelerator(cpu=on_cpu, mixed_precision="no", fsdp_plugin=fsdp_plugin(plan.precision, WRAPPED))
    return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[_ddp_handler(config.ddp)])


def _check_hook(hook: str) -> None:
    if hook == "bf16" and not torch.cuda.is_available():
        raise ConfigError(
            "distributed.ddp.comm_hook: expected none, fp16 or powersgd over gloo, found bf16 (needs NCCL)"
        )


def _ddp_handler(config: DDPConfig) -> DistributedDataParallelKwargs:
    hook = {
        "none": DDPCommunicationHookType.NO,
        "fp16": DDPCommunicationHookType.FP16,
        "bf16": DDPCommunicationHookType.BF16,
        "powersgd": DDPCommunicationHookType.POWER_SGD,
    }[config.comm_hook]
    options = {
        "matrix_approximation_rank": config.powersgd_rank,
        "start_powerSGD_iter": config.powersgd_start_step,
        "orthogonalization_epsilon": 1e-8,  # else gradients of zero become NaN with a rank of 1 or 2
    }
    return DistributedDataParallelKwargs(
        bucket_cap_mb=config.bucket_cap_mb,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        broadcast_buffers=config.broadcast_buffers,
        static_graph=config.static_graph,
        comm_hook=hook,
        comm_state_option=options if config.comm_hook == "powersgd" else {},
    )


def _runtime_class(engine: str) -> type[Engine]:
    if engine == FSDP2:
        from mmldlm.distributed.fsdp2 import FSDP2Engine

        return FSDP2Engine
    if engine.startswith("zero"):
        from mmldlm.distributed.zero import ZeroEngine

        return ZeroEngine
    return Engine


def _check_mixed_precision(precision: str) -> None:
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if asked not in ("no", precision):
        raise ConfigError(
            f"mixed_precision: {asked} in the launcher's config, but precision: {precision} in the run config, "
            "which is the source; leave it at no there"
        )


def _check_came(runtime: Engine, launch: LauncherEnv) -> None:
    """What Accelerate and torch.distributed say must be what the launcher asked for, proven by an all-reduce."""
    state = runtime.accelerator.state
    kinds = {SINGLE: "NO", FSDP2: "FSDP"}
    parallel = "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"
    kind = kinds.get(launch.engine, parallel if launch.engine == DDP else "DEEPSPEED")
    came = {"engine": state.distributed_type.name, "world size": state.num_processes, "rank": state.process_index}
    asked = {"engine": kind, "world size": launch.world_size, "rank": launch.rank}
    if dist.is_initialized():
        came |= {"torch's world size": dist.get_world_size(), "torch's rank": dist.get_rank()}
        asked |= {"torch's world size": launch.world_size, "torch's rank": launch.rank}
    for name, value in asked.items():
        if came[name] != value:
            raise ConfigError(f"{name}: {value} asked for by the launcher, {came[name]} came from Accelerate")
    if launch.engine != SINGLE and int(runtime.sum(torch.ones(1), "all-reduce of ones")) != launch.world_size:
        raise ConfigError(f"world size: {launch.world_size} asked for, but an all-reduce of ones gave another sum")
