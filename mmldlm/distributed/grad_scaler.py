"""The loss scale of fp16: float16 has nothing below 6e-8, so gradients are computed of a multiple of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmldlm.errors import ConfigError

FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
GROWS_AFTER = 2000  # steps; these and the factors of 2 are the defaults of `torch.amp.GradScaler`


class LossScale:
    """Dynamic scale (arXiv 1710.03740, section 3.2): halved where gradients overflow, doubled after many that did not.

    What `torch.amp.GradScaler` does, but for who decides: it lets each rank look at its own gradients, here it is their
    norm, which all ranks share, and by which the step is skipped, too. All of it stays on the device.
    """

    def __init__(self, device: torch.device):
        self.now = torch.tensor(FIRST, device=device)
        self.last = self.now  # of the step that was done last
        self._good = torch.tensor(0, device=device)  # steps without overflow since it changed

    def unscale(self, parameters: Sequence[Tensor], times: int) -> None:
        """Multiply the gradients by `times` / scale, in place; the scale is a power of 2, so it leaves no rounding."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_([local(gradient) for gradient in gradients], times / self.now)

    def follow(self, norm: Tensor) -> None:
        """Take in the norm of the gradients of a step."""
        finite = norm.isfinite()
        good = torch.where(finite, self._good + 1, 0)
        grows = good >= GROWS_AFTER
        factor = torch.where(finite, 1.0 + grows.float(), 0.5)
        self._good = torch.where(grows, 0, good)
        self.last, self.now = self.now, (self.now * factor).clamp(LOWEST, HIGHEST)

    def read(self) -> tuple[float, int]:
        """For a checkpoint; the host waits for it."""
        return float(self.now), int(self._good)

    def go_on(self, scale: float, good: int) -> None:
        """From what `read` gave."""
        self.now.fill_(min(max(scale, LOWEST), HIGHEST))
        self._good.fill_(good)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def runs_in(precision: str, engine: str) -> bool:
    """DeepSpeed has a loss scale of its own, with other rules, which no other engine could go on from."""
    return precision != "fp16" or not engine.startswith("zero")


def check_fp16(precision: str, engine: str, hook: str) -> None:
    """`ConfigError` where what is asked for cannot go on from scaled gradients."""
    if precision != "fp16":
        return
    if not runs_in(precision, engine):
        raise ConfigError(
            f"precision: expected fp32 or bf16 under {engine}, found fp16, which runs under single, ddp and fsdp2"
        )
    if engine == "ddp" and hook == "powersgd":
        raise ConfigError(
            "distributed.ddp.comm_hook: expected none, fp16 or bf16 with precision fp16, found powersgd, which adds "
            "what it left out to the next step's gradients, and these may be scaled otherwise"
        )
