"""Several tensors in one buffer, so that one copy moves them to another process or device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes, so that kernels can read several elements at a time


class _Place(NamedTuple):
    """Type and shape of a tensor, and its first byte in the buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class PackedTensors:
    """Tensors by name, as views of one buffer (uint8) at their `places`."""

    buffer: Tensor
    places: dict[str, _Place]

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor]) -> PackedTensors:
        """Copy tensors of one device into a new buffer there."""
        places, size, device = {}, 0, None
        for name, tensor in tensors.items():
            places[name] = _Place(tensor.dtype, tuple(tensor.shape), size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            device = tensor.device
        packed = cls(torch.empty(size, dtype=torch.uint8, device=device), places)
        for name, view in packed.tensors().items():
            view.copy_(tensors[name])
        return packed

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name. They share the buffer's memory."""
        return {
            name: self.buffer.narrow(0, start, prod(shape) * dtype.itemsize).view(dtype).view(shape)
            for name, (dtype, shape, start) in self.places.items()
        }

    def to(self, device: torch.device | str) -> PackedTensors:
        """Return the tensors on `device`. A copy from pinned memory does not block."""
        return PackedTensors(self.buffer.to(device, non_blocking=True), self.places)

    def pin_memory(self) -> PackedTensors:
        """Return the tensors in pinned memory."""
        return PackedTensors(self.buffer.pin_memory(), self.places)
