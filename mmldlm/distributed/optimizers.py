"""The optimizer of `optim`: how it is built, and its description."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmldlm.distributed.adamw import ShardedAdamW
from mmldlm.errors import ConfigError
from mmldlm.optim.config import OptimConfig, OptimizerName
from mmldlm.optim.param_groups import muon_matrices, parameter_groups


def check_device(config: OptimConfig, offloaded: bool, device_type: str) -> None:
    """Check that the optimizer's kernels run on the device, "cuda" or "cpu", or raise `ConfigError`."""
    if config.name == "deepspeed_adam" and not offloaded and device_type != "cuda":
        raise ConfigError(
            f"optim.name: deepspeed_adam is DeepSpeed's FusedAdam here, which is for CUDA, found {device_type}; "
            "expected adamw, or an engine that offloads the optimizer: zero2_offload, zero3_offload"
        )


def check_state_compatible(saved: OptimizerName, requested: OptimizerName) -> None:
    """Raise `ConfigError` if optimizer `requested` cannot resume from the state of optimizer `saved`."""
    if (saved == "muon") != (requested == "muon"):
        raise ConfigError(
            f"optim.name: the checkpoint holds the state of {saved}, from which {requested} cannot resume; expected "
            f"{saved if saved == 'muon' else 'adamw or deepspeed_adam'}"
        )


def build_optimizer(
    model: nn.Module, config: OptimConfig, offloaded: bool = False, sharded: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters of `model`. The engine must support it, see `capabilities`.

    It steps on the host if `offloaded`; with `sharded`, the parameters will be DTensors.
    """
    adamw: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "deepspeed_adam":
        from mmldlm.distributed.deepspeed_adam import build_deepspeed_adam

        return build_deepspeed_adam(parameter_groups(model, config.weight_decay), offloaded, **adamw)
    adamw["fused"] = bool(config.fused)  # auto: on every device that we train on
    if config.name == "adamw":
        # DeepSpeed knows PyTorch's own class.
        kind = ShardedAdamW if sharded else torch.optim.AdamW
        return kind(parameter_groups(model, config.weight_decay), **adamw)

    from mmldlm.distributed.muon import MuonAdamW

    matrices = muon_matrices(model)
    muon: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon |= {"momentum": config.muon.momentum, "nesterov": config.muon.nesterov, "ns_steps": config.muon.ns_steps}
    rest = parameter_groups(model, config.weight_decay, exclude=matrices)
    return MuonAdamW(matrices, muon, rest, adamw)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the implementation that steps, for the user, such as "torch.AdamW, fused"."""
    # `MuonAdamW` has two parts, the second of which is AdamW; any other optimizer stands for itself.
    *matrices, adam = getattr(optimizer, "parts", [optimizer])
    kind = torch.optim.AdamW if isinstance(adam, ShardedAdamW) else type(adam)
    name = f"{kind.__module__.split('.')[0]}.{kind.__name__}"
    name += ", fused" if adam.param_groups[0].get("fused") else ""
    if not matrices:
        return name
    sizes = [parameter.numel() for group in matrices[0].param_groups for parameter in group["params"]]
    return f"torch.Muon for {len(sizes)} matrices of {sum(sizes):,} parameters, {name} for the rest"
