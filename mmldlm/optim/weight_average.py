"""An exponential moving average of the tensors that an optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PART = 2**24  # elements that are copied at once where averages and weights change places


class WeightAverage:
    """Averages in float32 beside `weights`, with

        average <- average - (1 - decay) (average - weight)

    after each step that is taken. That is a step of gradient descent on (average - weight)^2 / 2, and SGD with a weight
    decay of 1 up the slope of average * weight is the same. So PyTorch's fused SGD does it, which needs no memory of
    its own, few kernels for any number of tensors, and leaves it out on a flag of the device, for which nobody waits.
    """

    def __init__(self, weights: Sequence[Tensor]):
        """`weights` are updated in place from here on: this rank's, float32."""
        self._weights = [weight.detach() for weight in weights]
        assert all(weight.dtype == torch.float32 for weight in self._weights), "averages of rounded weights stand still"
        self._averages = [weight.clone() for weight in self._weights]
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.grad = weight
        self._descent = torch.optim.SGD(self._averages, lr=1.0, weight_decay=1.0, maximize=True, fused=True)

    def follow(self, taken: Tensor, decay: float) -> None:
        """Take in the weights after a step; nothing changes where it was not `taken`: bool []."""
        descent: Any = self._descent
        descent.param_groups[0]["lr"] = 1 - decay
        descent.found_inf = 1 - taken.float()  # what `GradScaler` says to fused optimizers
        descent.step()

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the averages in the weights' place and the weights in theirs; a second time puts all back, bit by bit."""
        for pair in zip(self._averages, self._weights, strict=True):
            # In parts, since a partition of ZeRO is one large tensor.
            for average, weight in zip(*(tensor.view(-1).split(PART) for tensor in pair), strict=True):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
