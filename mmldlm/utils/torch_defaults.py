"""`torch_defaults`: independence of what a caller has set for tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Make tensors as torch does by itself: float32, on the host."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):  # which slows each operation down
            yield
    finally:
        torch.set_default_dtype(dtype)
