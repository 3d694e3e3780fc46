"""Modules on the meta device: their parameters have types and shapes, but no memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def materialize(module: nn.Module, device: torch.device | str, recurse: bool = True) -> None:
    """Move a module's buffers to `device`, and replace its meta parameters by new ones with arbitrary values."""

    def allocate(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if type(tensor) in (Tensor, nn.Parameter):  # `empty_like` would import sympy, for a second
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)  # sharded

    module._apply(allocate, recurse)
