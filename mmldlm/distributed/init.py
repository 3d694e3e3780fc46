"""Start the engine, in one process or many, on a CPU with gloo or on CUDA with NCCL."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType

from mmldlm.distributed.capabilities import ZERO_ENGINES
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.deepspeed_file import StepPlan
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.grad_scaler import LossScale
from mmldlm.distributed.launch import DDP, FSDP2, SINGLE, LauncherEnv
from mmldlm.distributed.library_calls import library_call
from mmldlm.distributed.process_group import export_settings, join_process_group, published_failures
from mmldlm.errors import ConfigError


def start_engine(config: DistributedConfig, launch: LauncherEnv, plan: StepPlan) -> Engine:
    """Join the process group that the launcher describes, and build the engine on it (collective).

    If the DeepSpeed file contradicts the run config, or a rank has another engine, a `ConfigError` names it.
    """
    deepspeed = None if launch.deepspeed is None else launch.deepspeed.resolve(plan)
    export_settings(config)
    watchdog = join_process_group(config, launch) if launch.engine != SINGLE else None
    processes = Collectives(launch.rank, launch.world_size, watchdog)
    with published_failures(processes):
        # Ranks with different engines would wait for one another forever.
        engines = processes.gather(f"{launch.engine} {launch.sharding}".strip(), "comparison of the engines")
        for rank, name in enumerate(engines):
            if name != engines[0]:
                raise ConfigError(
                    f"the ranks were not started alike: rank {rank}: engine is {name}, {engines[0]} on rank 0"
                )
        with library_call(launch.source, launch.accelerate):
            accelerator = _build_accelerator(config, launch, plan, deepspeed)
        kinds = {SINGLE: "NO", FSDP2: "FSDP", DDP: "MULTI_GPU" if torch.cuda.is_available() else "MULTI_CPU"}
        state, expected = accelerator.state, (kinds.get(launch.engine, "DEEPSPEED"), launch.world_size, launch.rank)
        found = state.distributed_type.name, state.num_processes, state.process_index
        if found != expected:
            raise ConfigError(f"engine, world size, rank: expected {expected} (launcher), found {found} (Accelerate)")
        engine = _engine_class(launch.engine)(accelerator, launch, watchdog)
        if plan.precision == "fp16":
            engine.loss_scale = LossScale(engine.device)
        # If another rank has failed by now, this raises its error.
        total = int(engine.sum(torch.ones(1), "all-reduce of ones"))
        assert total == launch.world_size, f"all-reduce of ones: {total} on {launch.world_size} ranks"
    return engine


class _DeepSpeedPlugin(DeepSpeedPlugin):
    def set_deepspeed_weakref(self) -> None:
        """Do nothing. The original configures the transformers package, which we do not use."""


def _build_accelerator(
    config: DistributedConfig, launch: LauncherEnv, plan: StepPlan, deepspeed: dict[str, Any] | None
) -> Accelerator:
    """Build Accelerate's object. Its precision stays "no", because the model itself uses autocast."""
    on_cpu = not torch.cuda.is_available()
    AcceleratorState._reset_state(reset_partial_state=True)  # a process may train several runs in turn
    backend = {"backend": "gloo" if on_cpu else "nccl"}
    if deepspeed is not None:
        from deepspeed import ops

        # Only inference on a CPU uses it. Compiling it at first use would take a minute and need g++.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(cpu=False, **backend)
        return Accelerator(mixed_precision="no", deepspeed_plugin=_DeepSpeedPlugin(hf_ds_config=deepspeed))
    if launch.engine == FSDP2:
        from mmldlm.distributed.fsdp2 import fsdp_plugin

        state = PartialState(cpu=on_cpu, **backend)
        state.distributed_type = DistributedType.MULTI_GPU  # Accelerate knows no FSDP on CPU and would train DDP
        plugin = fsdp_plugin(plan.precision)
        hybrid = ParallelismConfig(launch.replicas, launch.world_size // launch.replicas)
        parallelism = hybrid if launch.replicas > 1 else None
        return Accelerator(cpu=on_cpu, mixed_precision="no", fsdp_plugin=plugin, parallelism_config=parallelism)
    hook = DDPCommunicationHookType({"none": "no"}.get(config.ddp.comm_hook, config.ddp.comm_hook))
    ddp = DistributedDataParallelKwargs(**{**asdict(config.ddp), "comm_hook": hook})
    return Accelerator(cpu=on_cpu, mixed_precision="no", kwargs_handlers=[ddp])


def _engine_class(engine: str) -> type[Engine]:
    if engine == FSDP2:
        from mmldlm.distributed.fsdp2 import FSDP2Engine

        return FSDP2Engine
    if engine in ZERO_ENGINES:
        from mmldlm.distributed.zero import ZeroEngine

        return ZeroEngine
    return Engine
