"""Loss scaling for fp16.

float16 has no values below 6e-8, so we compute gradients from a multiple of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 2.0**16, 1.0, 2.0**24
GROWTH_INTERVAL = 2000  # steps, a default of `torch.amp.GradScaler`, like the factors of 2


class LossScale:
    """Dynamic loss scale (arXiv 1710.03740, section 3.2): halved on overflow, doubled after many steps without one.

    `torch.amp.GradScaler` detects an overflow on each rank, in its own gradients. We use the gradient norm, which all
    ranks share and which also decides whether a step is skipped. All state stays on the device.
    """

    def __init__(self, device: torch.device):
        self.scale = torch.tensor(INITIAL_SCALE, device=device)
        self.last_scale = self.scale  # scale of the latest completed step
        self._growth_tracker = torch.tensor(0, device=device)  # steps without overflow since the scale changed

    def unscale(self, parameters: Sequence[Tensor], factor: int) -> None:
        """Multiply the gradients in place by `factor` / scale. Dividing by the scale, a power of 2, is exact."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_([to_local(gradient) for gradient in gradients], factor / self.scale)

    def update(self, grad_norm: Tensor) -> None:
        """Update the scale after a step whose gradients had this norm."""
        finite = grad_norm.isfinite()
        count = torch.where(finite, self._growth_tracker + 1, 0)
        grows = count >= GROWTH_INTERVAL
        # 2 after enough finite steps, 1 after the other finite ones, 1/2 after an overflow.
        factor = torch.where(finite, 1.0 + grows.float(), 0.5)
        self._growth_tracker = torch.where(grows, 0, count)
        self.last_scale = self.scale.clone()
        self.scale.mul_(factor).clamp_(MIN_SCALE, MAX_SCALE)  # in place: a replayed backward pass reads this memory

    def get_state(self) -> tuple[float, int]:
        """Return (scale, steps without overflow) for a checkpoint. This synchronizes the host."""
        return float(self.scale), int(self._growth_tracker)

    def restore(self, scale: float, growth_tracker: int) -> None:
        """Restore the state that `get_state` returned."""
        self.scale.fill_(min(max(scale, MIN_SCALE), MAX_SCALE))
        self._growth_tracker.fill_(growth_tracker)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
