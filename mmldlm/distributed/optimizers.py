"""The optimizer that `optim` asks for: which engines can run it, its parameter groups, its name."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from mmldlm.distributed.launcher import ENGINES, SINGLE
from mmldlm.errors import ConfigError
from mmldlm.optim.config import OptimConfig, OptimizerName
from mmldlm.optim.param_groups import muon_matrices, parameter_groups


def engines_of(name: OptimizerName) -> tuple[str, ...]:
    """Engines that can run the optimizer, some of them on CUDA alone."""
    if name == "adamw":
        return (SINGLE, *ENGINES)
    zero = tuple(engine for engine in ENGINES if engine.startswith("zero"))
    return zero if name == "deepspeed_adam" else tuple(e for e in (SINGLE, *ENGINES) if e not in zero)


def check_optimizer(config: OptimConfig, engine: str, offloaded: bool, device_type: str) -> None:
    """`ConfigError` where the engine, or the device, cannot run the optimizer; `offloaded`: it steps on the host."""
    if engine not in engines_of(config.name):
        why = "needs whole matrices" if config.name == "muon" else "steps DeepSpeed's partitions"
        raise ConfigError(
            f"optim.name: {config.name} {why}, found engine {engine}; expected adamw there, or an engine of "
            f"{', '.join(engines_of(config.name))}"
        )
    if config.name != "deepspeed_adam":
        resolve_fused(config.fused, device_type)
    elif not offloaded and device_type != "cuda":
        raise ConfigError(
            f"optim.name: deepspeed_adam under {engine} is DeepSpeed's FusedAdam, which is for CUDA, found "
            f"{device_type}; expected adamw, or an engine that offloads the optimizer: zero2_offload, zero3_offload"
        )


def check_same_state(saved: OptimizerName, asked: OptimizerName) -> None:
    """`ConfigError` where optimizer `asked` cannot go on from the state of optimizer `saved`."""
    if (saved == "muon") != (asked == "muon"):
        raise ConfigError(
            f"optim.name: the checkpoint holds the state of {saved}, from which {asked} cannot go on; expected "
            f"{saved if saved == 'muon' else 'adamw or deepspeed_adam'}"
        )


def build_optimizer(
    model: nn.Module, config: OptimConfig, device_type: str, offloaded: bool = False
) -> torch.optim.Optimizer:
    """Over the trainable parameters of `model`, for an engine that `check_optimizer` has let pass."""
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "deepspeed_adam":
        from mmldlm.distributed.deepspeed_adam import build_deepspeed_adam

        return build_deepspeed_adam(parameter_groups(model, config.weight_decay), offloaded, **adamw)
    adamw["fused"] = resolve_fused(config.fused, device_type)
    if config.name == "adamw":
        return torch.optim.AdamW(parameter_groups(model, config.weight_decay), **adamw)

    from mmldlm.distributed.muon import MuonAdamW

    matrices = muon_matrices(model)
    of_muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    of_muon |= {"momentum": config.muon.momentum, "nesterov": config.muon.nesterov, "ns_steps": config.muon.ns_steps}
    rest = parameter_groups(model, config.weight_decay, without=matrices)
    return MuonAdamW(matrices, of_muon, rest, adamw)


def resolve_fused(asked: Literal["auto"] | bool, device_type: str) -> bool:
    """Whether AdamW runs fused; `ConfigError` where it was demanded and the device has none."""
    available = device_type in ("cuda", "cpu")
    if asked is True and not available:
        raise ConfigError(f"optim.fused: true, but {device_type} has no fused AdamW; use auto")
    return available if asked == "auto" else bool(asked)


def implementation(optimizer: torch.optim.Optimizer) -> str:
    """The implementation that really steps, for the user."""
    *matrices, adam = getattr(optimizer, "parts", [optimizer])
    name = f"{type(adam).__module__.split('.')[0]}.{type(adam).__name__}"
    name += ", fused" if adam.param_groups[0].get("fused") else ""
    if not matrices:
        return name
    held = [parameter.numel() for group in matrices[0].param_groups for parameter in group["params"]]
    return f"torch.Muon for {len(held)} matrices of {sum(held):,} parameters, {name} for the rest"
