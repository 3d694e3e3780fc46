"""Settings of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mmldlm.settings.declaration import require_effect, setting

OptimizerName = Literal["adamw", "muon", "deepspeed_adam"]


@dataclass(frozen=True)
class MuonConfig:
    """Settings of Muon."""

    momentum: float = setting(0.95, "momentum of the mean gradient, which Muon orthogonalizes", above=0, below=1)
    nesterov: bool = setting(True, "use Nesterov momentum")
    ns_steps: int = setting(5, "Newton-Schulz iterations of the orthogonalization", at_least=1, at_most=99)


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the optimizer and of the peak learning rate."""

    name: OptimizerName = setting(
        "adamw",
        "adamw: PyTorch's AdamW. muon: Muon for the matrices of the blocks and AdamW for the rest (single, ddp, "
        "fsdp2); the host then waits for the gradient norm in each step. deepspeed_adam: DeepSpeed's AdamW "
        "(ZeRO), on the host if the engine offloads the optimizer, otherwise on CUDA",
        advice="adamw unless you compare optimizers. deepspeed_adam if an engine offloads the optimizer",
    )
    lr: float = setting(
        3e-4,
        "peak learning rate",
        above=0,
        advice="The first setting to tune. Lower for larger models: configs/ has 1e-3 at 10 million parameters, 3e-4 "
        "at 415. Halve it if a run diverges",
    )
    betas: tuple[float, float] = setting((0.9, 0.98), "decay of AdamW's first and second moments")
    eps: float = setting(1e-8, "added to the root of the second moment", above=0)
    weight_decay: float = setting(0.01, "decay of matrices. Norms, biases and embeddings have no decay", at_least=0)
    fused: Literal["auto"] | bool = setting(
        "auto",
        "auto, true: AdamW's fused kernel. false: other kernels, with which the host waits for the GPU in each step",
    )
    muon: MuonConfig = setting(MuonConfig(), "Muon, under `optim.name: muon`")
    clip_norm: float = setting(
        1.0,
        "maximal global gradient norm; 0: no clipping",
        at_least=0,
        advice="Lower it to 0.5 if optim/grad_norm has peaks",
    )
    lr_scaling: Literal["none", "sqrt", "linear"] = setting(
        "none",
        "scale each step's learning rate by a power of its global batch / lr_reference_batch: 0 (none), 1/2 "
        "(sqrt) or 1 (linear)",
    )
    lr_reference_batch: int = setting(128, "global batch size in samples for which `optim.lr` was chosen", at_least=1)
    warmup_steps: int | float = setting(
        0.02,
        "steps of linear warmup. A number below 1 is a fraction of train.steps",
        at_least=0,
        advice="Longer for a high learning rate or a large batch",
    )
    warmup_bounds: tuple[int, int] | None = setting(
        None, "minimal and maximal steps of a warmup that is a fraction, e.g. [1000, 5000]; null: no bounds"
    )

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected values in [0, 1), found {list(self.betas)}")
        if self.warmup_steps >= 1 and self.warmup_steps != int(self.warmup_steps):
            raise ValueError(f"warmup_steps: expected a whole number or a fraction below 1, found {self.warmup_steps}")
        if self.warmup_bounds is not None:
            low, high = self.warmup_bounds
            if not 0 <= low <= high:
                raise ValueError(f"warmup_bounds: expected [minimum, maximum], found {[low, high]}")
            if not 0 < self.warmup_steps < 1:
                raise ValueError(
                    f"warmup_bounds: does nothing with warmup_steps: {self.warmup_steps}, expected null or a fraction"
                )
        require_effect(self, "lr_reference_batch", "lr_scaling", "sqrt", "linear")
        require_effect(self, "muon", "name", "muon")
        if self.name == "deepspeed_adam" and self.fused != "auto":
            raise ValueError(f"fused: expected auto under name: deepspeed_adam, found {str(self.fused).lower()}")
