"""Linear maps under autocast, but for those of few rows on a CPU.

There a product in half precision begins with casts of its weights and with kernels that are looked up, which for a row
for each sample takes two to four times as long as the product in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.batch import ROWS


def leaves_autocast(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """For a product of `x` [..., I] with `weight`: without autocast where rows are few on a CPU."""
    if (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and x.dtype == weight.dtype == torch.float32
        and x.numel() < ROWS * x.shape[-1]
        and not torch.compiler.is_compiling()
    ):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with leaves_autocast(x, self.weight):
            return super().forward(x)
