"""The exponential moving average (EMA) of the weights: its settings, its decay by step, its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmldlm.settings.declaration import setting

Weights = Literal["ema", "trained"]  # the EMA of the weights, or the weights themselves
WEIGHTS_LABELS: dict[Weights, str] = {"ema": "EMA weights", "trained": "trained weights"}
SWAP_CHUNK_SIZE = 2**24  # elements that a swap of averages and weights copies at once


@dataclass(frozen=True)
class EmaConfig:
    """Settings of the EMA of the weights."""

    decay: float = setting(
        0.0,
        "decay of the EMA per accepted step, e.g. 0.999 to 0.9999 for long runs; 0: no EMA. An EMA costs 4 "
        "bytes per trained parameter, sharded like the optimizer's state",
        at_least=0,
        below=1,
    )
    warmup: bool = setting(
        True,
        "limit the decay to (1 + n) / (10 + n) in step n, counted from 0, so that the EMA forgets the initial weights",
    )
    evaluate: bool = setting(
        True, "use the EMA for validations in training, and by default in `evaluate` and `sample` (see --weights)"
    )

    @property
    def eval_weights(self) -> Weights:
        """Weights that validations in training use."""
        return "ema" if self.decay and self.evaluate else "trained"


def decay_at(step: int, config: EmaConfig) -> float:
    """Return the decay in optimizer step `step`, counted from 0. The decay has no state to resume.

    The warmup follows `num_updates` of TensorFlow's `tf.train.ExponentialMovingAverage`, which is common in diffusion
    models.
    """
    return min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay


class EmaWeights:
    """EMA of `weights` in float32, updated after each accepted step by

        average <- average - (1 - decay) (average - weight)

    This is a step of gradient descent on (average - weight)^2 / 2, or of SGD with a weight decay of 1 that maximizes
    average * weight. So PyTorch's fused SGD can compute it: without temporary memory, with few kernels for any number
    of tensors, and with a flag on the device that skips the update without synchronizing the host.
    """

    def __init__(self, weights: Sequence[Tensor]):
        """Start the EMA from this rank's `weights`, float32 tensors that must be updated in place."""
        self._weights = [weight.detach() for weight in weights]
        # In half precision, rounding would swallow most of the small changes of weights and averages.
        assert all(weight.dtype == torch.float32 for weight in self._weights), "EMA: weights must be float32"
        self._averages = [weight.clone() for weight in self._weights]
        for average, weight in zip(self._averages, self._weights, strict=True):
            average.grad = weight
        self._sgd = torch.optim.SGD(self._averages, lr=1.0, weight_decay=1.0, maximize=True, fused=True)

    def update(self, accepted: Tensor, decay: float) -> None:
        """Update the EMA with the weights after a step, unless the step was skipped (`accepted`: bool [])."""
        sgd: Any = self._sgd
        sgd.param_groups[0]["lr"] = 1 - decay
        sgd.found_inf = 1 - accepted.float()  # `GradScaler` sets this flag to make fused optimizers skip a step
        sgd.step()

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the values of averages and weights in place. A second call restores both exactly."""
        for pair in zip(self._averages, self._weights, strict=True):
            # In chunks, since a partition of ZeRO is one large tensor.
            for average, weight in zip(*(tensor.view(-1).split(SWAP_CHUNK_SIZE) for tensor in pair), strict=True):
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)
