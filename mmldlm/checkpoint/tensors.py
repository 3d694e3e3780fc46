"""Read and write the safetensors files of a checkpoint."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.checkpoint.slices import DTYPES, SlicedTensor, tensor_file_name
from mmldlm.errors import DataError, NumericalError, StorageError
from mmldlm.utils.short_repr import display_name, short_repr, truncate


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a safetensors file. Raises `NumericalError` before writing if a value is not finite."""
    host_tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        if host.is_floating_point() and host.numel() and not _is_finite(host):
            raise NumericalError(f"{name} has non-finite values: not saved to {path.name}")
        # Copy tensors that share memory, because safetensors does not support shared storage.
        storage = host.untyped_storage().data_ptr()
        host_tensors[name] = host.clone() if storage in storages else host
        storages.add(storage)
    try:
        path.touch()
        mode = path.stat().st_mode  # permissions by the umask, since safetensors replaces the file with its own
        save_file(host_tensors, path)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor on the host has neither NaN nor infinities.

    We use numpy, because it works in this thread alone. A parallel operator of torch in the thread that writes a
    checkpoint would start a second OpenMP team. From then on, libgomp would put the training's threads to sleep at
    every barrier.
    """
    # Numpy lacks this type: a value is not finite if all bits of the exponent are set.
    if tensor.dtype == torch.bfloat16:
        return bool((tensor.view(torch.int16).numpy() & 0x7FFF).max() < 0x7F80)
    values = tensor.numpy()
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))  # the minimum of values with a NaN is NaN


class TensorSource(Mapping[str, Tensor]):
    """Tensors by name. A tensor, or a part of it, is created on access."""

    @abstractmethod
    def meta(self) -> dict[str, Tensor]:
        """Return tensors without data that have the dtypes and shapes of all tensors."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in row-major order, 1-D, without the rest of the tensor."""


class TensorFiles(TensorSource):
    """Tensors of one group of a verified checkpoint, by name. They are read from disk on access, whole or in part.

    A file is opened when its first slice is read.
    """

    def __init__(self, tensors: Mapping[str, tuple[SlicedTensor, _Files]]):
        self._tensors = tensors

    @classmethod
    def open(cls, checkpoint: Checkpoint, group: str) -> TensorFiles:
        """Return the tensors of `group`. Raises DataError if there is no such group."""
        tensors = cls.find(checkpoint, group)
        if tensors is None:
            groups = truncate(", ".join(checkpoint.tensors), 400)
            raise DataError(f"{checkpoint.path} has no tensors of {group}; it has {groups or 'none'}")
        return tensors

    @classmethod
    def find(cls, checkpoint: Checkpoint, group: str) -> TensorFiles | None:
        """Return the tensors of `group` like `open`, but None if there is no such group."""
        sliced = checkpoint.tensors.get(group)
        if sliced is None:
            return None
        names = (tensor_file_name(group, index, sliced.files) for index in range(sliced.files))
        files = _Files([checkpoint.path / name for name in names], checkpoint.files)
        return cls({name: (tensor, files) for name, tensor in sliced.tensors.items()})

    @classmethod
    def of_file(cls, path: Path) -> TensorFiles:
        """Return the tensors of a file. Raises DataError if it is not safetensors."""
        files = _Files([path])
        return cls({name: (SlicedTensor(dtype, shape, ((0, 0),)), files) for name, dtype, shape in files.entries()})

    def filter(self, predicate: Callable[[str], bool]) -> TensorFiles:
        """Return the tensors whose names satisfy `predicate`."""
        return TensorFiles({name: entry for name, entry in self._tensors.items() if predicate(name)})

    def overlay(self, other: TensorFiles) -> TensorFiles:
        """Return these tensors, replaced or completed by the tensors of `other`."""
        return TensorFiles({**self._tensors, **other._tensors})

    def with_empty(self, names: Sequence[str]) -> TensorFiles:
        """Return these tensors and an empty float32 tensor for each of `names`."""
        empty = SlicedTensor("F32", (0,), ()), _Files([])
        return TensorFiles({**self._tensors, **dict.fromkeys(names, empty)})

    def meta(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
            for name, (tensor, _) in self._tensors.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in row-major order, 1-D, without reading other rows.

        Raises:
            DataError: A file is not safetensors, or lacks the slice that the manifest names.
        """
        tensor, files = self._tensors[name]
        parts = []
        for index, first, last in tensor.overlapping(start, stop):
            within = slice(max(start, first) - first, min(stop, last) - first)
            parts.append(files.read(index, name, tensor.dtype, tensor.slice_shape(first, last), within))
        if (found := sum(map(len, parts))) != (expected := max(0, stop - start)):
            raise DataError(f"{display_name(name)}: its slices have {found} of {expected} elements")
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[tensor.dtype])

    def __getitem__(self, name: str) -> Tensor:
        tensor, _ = self._tensors[name]
        return self.read(name, 0, tensor.numel).view(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def meta_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors without data that have the names, dtypes and shapes of `tensors`, without reading any."""
    return tensors.meta() if isinstance(tensors, TensorSource) else tensors


def read_range(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a tensor in row-major order, 1-D."""
    if isinstance(tensors, TensorSource):
        return tensors.read(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


class _Files:
    """Safetensors files of a group by number, opened on access. They are memory-mapped, so no file stays open.

    `verified` has the file names of a manifest. Raises `DataError` for a file that is not among them.
    """

    def __init__(self, paths: Sequence[Path], verified: Collection[str] | None = None):
        self._paths, self._verified = paths, verified
        self._open: dict[int, Any] = {}

    def entries(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, dtype and shape of every tensor in the first file. Raises DataError if it is not safetensors."""
        file = self._get(0)
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            if (dtype := part.get_dtype()) not in DTYPES:
                raise DataError(f"{self._paths[0]}: {display_name(name)} has type {short_repr(dtype)}")
            yield name, dtype, tuple(part.get_shape())

    def read(self, index: int, name: str, dtype: str, shape: tuple[int, ...], within: slice) -> Tensor:
        """Return elements of a tensor's slice in a file, 1-D. Raises DataError unless it has this dtype and shape."""
        file = self._get(index)
        try:
            part = file.get_slice(name)
            if (part.get_dtype(), tuple(part.get_shape())) != (dtype, shape):
                found = f"{part.get_dtype()} {short_repr(part.get_shape())}"
                raise DataError(
                    f"{self._paths[index]}: {display_name(name)} is {found}, expected {dtype} {list(shape)}"
                )
            if not shape:
                return file.get_tensor(name).view(1)
            row = math.prod(shape[1:])
            first = within.start // row
            rows = part[first : -(-within.stop // row)].reshape(-1)
            return rows[within.start - first * row : within.stop - first * row]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DataError(
                f"cannot read {display_name(name)} of {self._paths[index]}: {display_name(str(error))}"
            ) from error

    def _get(self, index: int) -> Any:
        if index not in self._open:
            if self._verified is not None and self._paths[index].name not in self._verified:
                raise DataError(f"{self._paths[index]}: is not in the manifest of its checkpoint")
            try:
                self._open[index] = safe_open(self._paths[index], framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise DataError(f"cannot read {self._paths[index]}: {display_name(str(error))}") from error
        return self._open[index]
