"""Linear layers that leave autocast for inputs of few rows on a CPU.

There a half-precision product first casts its weights and looks up a kernel. With one row per sample that takes two to
four times as long as the product in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.batch import ROW_MULTIPLE


def autocast_unless_few_rows(x: Tensor, weight: Tensor) -> AbstractContextManager[Any]:
    """Return a context for the product of `x` [..., I] with `weight`; it disables autocast for few rows on a CPU."""
    if (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and x.dtype == weight.dtype == torch.float32
        and x.numel() < ROW_MULTIPLE * x.shape[-1]
        and not torch.compiler.is_compiling()
    ):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


class Linear(nn.Linear):
    """`nn.Linear` under `autocast_unless_few_rows`."""

    def forward(self, x: Tensor) -> Tensor:
        with autocast_unless_few_rows(x, self.weight):
            return super().forward(x)
