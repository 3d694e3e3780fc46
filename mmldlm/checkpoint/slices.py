"""Describe which file of a checkpoint holds which elements of a tensor.

Each of N processes writes its part of the state to `model-00001-of-0000N.safetensors`. A slice is a range [start, stop)
of a tensor's elements in row-major order. It can describe the parts of every engine: whole tensors, rows, and ranges
that begin within a row.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

DTYPES = {  # keys are the names in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_file_name(group: str, index: int, count: int) -> str:
    """Return the name of file `index` of the `count` files of a group."""
    return f"{group}.safetensors" if count == 1 else f"{group}-{index + 1:05}-of-{count:05}.safetensors"


@dataclass(frozen=True)
class SlicedTensor:
    """Type and shape of a tensor, and its slices.

    A slice ends where the next one starts, so each element is in exactly one slice.

    Attributes:
        dtype: A key of `DTYPES`.
        shape: Shape of the whole tensor.
        slices: If file i has the i-th of equal slices, the number of elements per slice (the last one may be smaller).
            This takes the same space for 1 and for 1,000 files. Otherwise (start, file) of each slice, both ascending.
    """

    dtype: str
    shape: tuple[int, ...]
    slices: int | tuple[tuple[int, int], ...]

    @classmethod
    def like(cls, tensor: Tensor, slices: int | tuple[tuple[int, int], ...]) -> SlicedTensor:
        """Return the description of a tensor with the dtype and shape of `tensor`."""
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape), slices if tensor.numel() else ())

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slice_in(self, file: int) -> tuple[int, int]:
        """Return (start, stop) of the slice in a file, or (0, 0) if the file has none."""
        if isinstance(self.slices, int):
            start, stop = (min(index * self.slices, self.numel) for index in (file, file + 1))
            return (start, stop) if start < stop else (0, 0)
        # The last slice ends with the tensor.
        bounds = pairwise((*self.slices, (self.numel, -1)))
        return next(((start, stop) for (start, holder), (stop, _) in bounds if holder == file), (0, 0))

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, stop) for every slice that overlaps [start, stop), in order."""
        if start >= stop:
            return
        if isinstance(self.slices, int):
            files: Iterable[int] = range(start // self.slices, -(-stop // self.slices))
        else:
            first = bisect_right(self.slices, start, key=lambda piece: piece[0]) - 1
            files = [file for begin, file in self.slices[first:] if begin < stop]
        yield from ((file, *self.slice_in(file)) for file in files)

    def slice_shape(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the shape in which a slice is stored: the tensor's shape, whole rows, or one dimension."""
        if (start, stop) == (0, self.numel):
            return self.shape
        row = math.prod(self.shape[1:])
        is_rows = start % row == 0 and stop % row == 0
        return ((stop - start) // row, *self.shape[1:]) if is_rows else (stop - start,)


@dataclass(frozen=True)
class TensorGroup:
    """The tensors of a group ("model", "optimizer", "ema") by name, and the number of its files."""

    files: int
    tensors: Mapping[str, SlicedTensor]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorGroup:
        """Restore a group from the JSON of its `asdict`, which has lists instead of tuples."""
        tensors = {}
        for name, tensor in value["tensors"].items():
            slices = tensor["slices"]
            slices = slices if isinstance(slices, int) else tuple((start, file) for start, file in slices)
            tensors[name] = SlicedTensor(tensor["dtype"], tuple(tensor["shape"]), slices)
        return cls(value["files"], tensors)
