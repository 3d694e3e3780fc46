"""Which file of a checkpoint holds which elements of a tensor.

Each of N processes writes its own part of the state to `model-00001-of-0000N.safetensors`. A slice is a range
[start, stop) of a tensor's elements in row-major order, which describes the parts of every engine: whole tensors, rows
and ranges that begin within a row.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmldlm.errors import DataError
from mmldlm.utils.short_repr import display_name, short_repr

MAX_DIMS, MAX_GROUPS, MAX_FILES = 16, 16, 2**16
DTYPES = {  # by their names in safetensors
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

    A slice ends where the next one starts, so every value with valid types covers each element exactly once.

    Attributes:
        dtype: A key of `DTYPES`.
        shape: Shape of the whole tensor.
        slices: Elements per slice if file i has the i-th of equal slices (the last one may be smaller), which takes
            as many bytes for 1,000 files as for one; otherwise (start, file) of each slice, both ascending.
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

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def files(self) -> range | list[int]:
        """Files that have a slice of the tensor."""
        if isinstance(self.slices, int):
            return range(-(-self.numel // self.slices))
        return [file for _, file in self.slices]

    def slice_in(self, file: int) -> tuple[int, int]:
        """Return (start, stop) of the slice in a file; (0, 0) if the file has none."""
        if isinstance(self.slices, int):
            start, stop = (min(index * self.slices, self.numel) for index in (file, file + 1))
            return (start, stop) if start < stop else (0, 0)
        # Behind the last slice is the end of the tensor.
        bounds = pairwise((*self.slices, (self.numel, -1)))
        return next(((start, stop) for (start, holder), (stop, _) in bounds if holder == file), (0, 0))

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, stop) of every slice that has elements of [start, stop), in order."""
        if start >= stop:
            return
        if isinstance(self.slices, int):
            files: Iterable[int] = range(start // self.slices, -(-stop // self.slices))
        else:
            first = bisect_right(self.slices, start, key=lambda piece: piece[0]) - 1
            files = [file for begin, file in self.slices[first:] if begin < stop]
        yield from ((file, *self.slice_in(file)) for file in files)

    def slice_shape(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the shape in which a slice is stored: the tensor's, or that of whole rows, or else one dimension."""
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

    def file_name(self, group: str, index: int) -> str:
        """Return the name of a file of this group."""
        return tensor_file_name(group, index, self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        return {"files": self.files, "tensors": {name: asdict(tensor) for name, tensor in self.tensors.items()}}


def groups_from_json(value: Any, sizes: Mapping[str, int]) -> dict[str, TensorGroup]:
    """Parse the groups of a manifest, as `TensorGroup.to_json` returned them; `sizes` are bytes of each file.

    Raises:
        DataError: A value has a wrong type, slices do not cover a tensor exactly once, or a file is missing or too
            small; the message names the tensor.
    """
    if not isinstance(value, dict) or len(value) > MAX_GROUPS:
        raise DataError(f"tensors are {short_repr(value)}, expected at most {MAX_GROUPS} groups")
    return {name: _group_from_json(name, group, sizes) for name, group in value.items()}


def _group_from_json(name: str, value: Any, sizes: Mapping[str, int]) -> TensorGroup:
    if not isinstance(value, dict) or value.keys() != {"files", "tensors"} or not isinstance(value["tensors"], dict):
        raise DataError(f"{display_name(name)} is {short_repr(value)}, expected its files and tensors")
    if not (type(value["files"]) is int and 0 < value["files"] <= MAX_FILES):
        raise DataError(f"{display_name(name)} has {short_repr(value['files'])} files, expected 1 to {MAX_FILES}")
    group = TensorGroup(value["files"], {key: _tensor_from_json(key, item) for key, item in value["tensors"].items()})
    # A process that has no part of a group writes no file.
    present = {index for index in range(group.files) if group.file_name(name, index) in sizes}
    leading = next(index for index in range(group.files + 1) if index not in present)
    space = sum(sizes[group.file_name(name, index)] for index in present)
    for key, tensor in group.tensors.items():
        files = tensor.files
        if not (len(files) <= leading if isinstance(files, range) else present.issuperset(files)):
            raise DataError(f"{display_name(key)} has slices in files of {display_name(name)} that are missing")
        if tensor.nbytes > space:
            raise DataError(f"{display_name(key)} has {tensor.nbytes} bytes, more than the {space} of its files")
    return group


def _tensor_from_json(name: str, value: Any) -> SlicedTensor:
    try:
        # Not isinstance, for which True is an int.
        dtype, shape, slices = value["dtype"], tuple(value["shape"]), value["slices"]
        sizes_valid = len(shape) <= MAX_DIMS and all(type(size) is int and 0 <= size < 2**48 for size in shape)
        if len(value) != 3 or dtype not in DTYPES or not sizes_valid or math.prod(shape) >= 2**48:
            raise ValueError
        if not math.prod(shape):
            valid = slices == []
        elif type(slices) is int:
            valid = 0 < slices < 2**48
        else:
            pieces = list(zip(*slices, strict=True))
            starts, files = pieces
            ascending = all(a < b for piece in pieces for a, b in pairwise(piece))
            integers = all(type(number) is int for piece in pieces for number in piece)
            valid = integers and ascending and starts[0] == 0 and starts[-1] < math.prod(shape) and files[0] >= 0
        if not valid:
            raise ValueError
    except (TypeError, KeyError, ValueError, OverflowError):
        raise DataError(
            f"{display_name(name)} is {short_repr(value)}, expected dtype, shape, and slices that cover it exactly once"
        ) from None
    return SlicedTensor(dtype, shape, slices if type(slices) is int else tuple((start, file) for start, file in slices))
