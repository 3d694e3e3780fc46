"""Settings of the optimizer, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mmldlm.schema import setting

OptimizerName = Literal["adamw", "muon", "deepspeed_adam"]


@dataclass(frozen=True)
class MuonConfig:
    momentum: float = setting(0.95, "decay of the mean of gradients that is orthogonalised", above=0, below=1)
    nesterov: bool = setting(True, "orthogonalise the mean as the next step would see it")
    ns_steps: int = setting(5, "Newton-Schulz iterations of the orthogonalisation", at_least=1, at_most=99)


@dataclass(frozen=True)
class OptimConfig:
    name: OptimizerName = setting(
        "adamw",
        "adamw: PyTorch's; muon: Muon for the matrices of the blocks, AdamW for the rest (single, ddp, fsdp2), for "
        "which the host reads the gradient norm in each step; "
        "deepspeed_adam: DeepSpeed's AdamW, on the host where the engine offloads the optimizer, else on CUDA (ZeRO)",
    )
    lr: float = setting(3e-4, "peak learning rate", above=0)
    betas: tuple[float, float] = setting((0.9, 0.98), "decay of AdamW's first and second moments")
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = setting(0.01, "decay of matrices; norms, biases and embeddings have none", at_least=0)
    fused: Literal["auto"] | bool = setting(
        "auto",
        "AdamW in one kernel; true is an error where it cannot run. With false the host waits for a GPU in each step",
    )
    muon: MuonConfig = setting(MuonConfig(), "Muon, under `optim.name: muon`")
    clip_norm: float = setting(1.0, "largest global gradient norm; 0: no clipping", at_least=0)
    warmup_steps: int | float = setting(
        0.02, "steps of linear warmup; below 1: that fraction of train.steps", at_least=0
    )

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: must lie in [0, 1), found {list(self.betas)}")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: expected a whole number or a fraction below 1, found {self.warmup_steps}")
        if self.name == "deepspeed_adam" and self.fused != "auto":
            raise ValueError(f"fused: expected auto under name: deepspeed_adam, found {str(self.fused).lower()}")
        if self.name != "muon" and self.muon != MuonConfig():
            raise ValueError(f"muon: does nothing under name: {self.name}, expected its defaults or name: muon")


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
