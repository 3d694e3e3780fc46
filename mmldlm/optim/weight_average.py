"""Exponential moving average (EMA) of the tensors that an optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SWAP_CHUNK_SIZE = 2**24  # elements that are copied at once when averages and weights are swapped


class EmaWeights:
    """EMA of `weights` in float32, updated after each accepted step by

        average <- average - (1 - decay) (average - weight)

    This is a step of gradient descent on (average - weight)^2 / 2, or of SGD with a weight decay of 1 that maximizes
    average * weight. So PyTorch's fused SGD computes it: without temporary memory, with few kernels for any number of
    tensors, and skipped by a flag on the device without synchronizing the host.
    """

    def __init__(self, weights: Sequence[Tensor]):
        """Start the EMA from this rank's `weights`, float32 tensors that must be updated in place."""
        self._weights = [weight.detach() for weight in weights]
        # Weights in half precision hardly change by rounding, and neither would their average.
        assert all(weight.dtype == torch.float32 for weight in self._weights), "EMA: weights must be float32"
        self._averages = [weight.clone() for weight in self._weights]
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.grad = weight
        self._sgd = torch.optim.SGD(self._averages, lr=1.0, weight_decay=1.0, maximize=True, fused=True)

    def update(self, accepted: Tensor, decay: float) -> None:
        """Update the EMA with the weights after a step, unless the step was skipped (`accepted`: bool [])."""
        sgd: Any = self._sgd
        sgd.param_groups[0]["lr"] = 1 - decay
        sgd.found_inf = 1 - accepted.float()  # the flag by which `GradScaler` makes fused optimizers skip a step
        sgd.step()

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the values of averages and weights in place; a second call restores both exactly."""
        for pair in zip(self._averages, self._weights, strict=True):
            # In chunks, since a partition of ZeRO is one large tensor.
            for average, weight in zip(*(tensor.view(-1).split(SWAP_CHUNK_SIZE) for tensor in pair), strict=True):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
