"""AdamW over decayed and undecayed parameters, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from mmldlm.errors import ConfigError
from mmldlm.schema import setting


@dataclass(frozen=True)
class OptimConfig:
    lr: float = setting(3e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = setting((0.9, 0.98), "decay of AdamW's first and second moments")
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = setting(0.01, "decay of matrices; norms, biases and embeddings have none", at_least=0)
    fused: Literal["auto"] | bool = setting("auto", "AdamW in one kernel; true is an error where it cannot run")
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    warmup_steps: int | float = setting(
        0.02, "steps of linear warmup; below 1: that fraction of train.steps", at_least=0
    )

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: must lie in [0, 1), found {list(self.betas)}")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: expected a whole number or a fraction below 1, found {self.warmup_steps}")


@dataclass(frozen=True)
class ScheduleConfig:
    lr: Literal["constant", "linear", "cosine"] = setting("cosine", "course of the learning rate after warmup")
    min_lr_ratio: float = setting(0.1, "learning rate at the last step over the peak", at_least=0, at_most=1)


def resolved_warmup(optim: OptimConfig, total_steps: int) -> int:
    if optim.warmup_steps < 1:
        return math.ceil(optim.warmup_steps * total_steps)
    return int(optim.warmup_steps)


def lr_at(step: int, total_steps: int, optim: OptimConfig, schedule: ScheduleConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 0; no state, so it resumes as it is."""
    warmup = resolved_warmup(optim, total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    if schedule.lr == "constant":
        return optim.lr
    if schedule.lr == "linear":
        remaining = 1 - progress
    else:  # half a cosine (SGDR, arXiv 1608.03983, eq. 5, without restarts)
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return optim.lr * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining)


def resolve_fused(asked: Literal["auto"] | bool, device_type: str) -> bool:
    """Whether AdamW runs fused; `ConfigError` where it was demanded and the device has none."""
    available = device_type in ("cuda", "cpu")
    if asked is True and not available:
        raise ConfigError(f"optim.fused: true, but {device_type} has no fused AdamW; use auto")
    return available if asked == "auto" else bool(asked)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters in two groups: decayed (matrices of linear maps), not decayed (all else)."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings |= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("position")}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decayed if parameter.dim() >= 2 and id(parameter) not in embeddings else plain).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig, device_type: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=resolve_fused(config.fused, device_type),
    )
