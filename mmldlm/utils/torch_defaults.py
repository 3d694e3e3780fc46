"""Create tensors independently of the defaults that a caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Create tensors with torch's own defaults: float32, on the host."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):  # the context slows every operation down
            yield
    finally:
        torch.set_default_dtype(dtype)
