"""Reading and writing of the safetensors files of a checkpoint."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.checkpoint.slices import DTYPES, SlicedTensor
from mmldlm.errors import DataError, NumericalError, StorageError
from mmldlm.utils.short_repr import display_name, short_repr, truncate


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a safetensors file; if one has non-finite values, raise `NumericalError` and create none."""
    host_tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().cpu().contiguous()
        if host.is_floating_point() and host.numel() and not _is_finite(host):
            raise NumericalError(f"{name} has non-finite values: not saved to {path.name}")
        # Tensors that share memory are written separately: safetensors does not support shared storage.
        storage = host.untyped_storage().data_ptr()
        host_tensors[name] = host.clone() if storage in storages else host
        storages.add(storage)
    try:
        save_file(host_tensors, path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _is_finite(tensor: Tensor) -> bool:
    """Return whether a contiguous tensor on the host has neither NaN nor infinities.

    By numpy, which uses this thread alone. A parallel operator of torch in the thread that writes a checkpoint would
    start a second OpenMP team, and from then on libgomp would put the training's threads to sleep at every barrier.
    """
    if tensor.dtype == torch.bfloat16:  # which numpy does not know: all bits of the exponent are set
        return bool((tensor.view(torch.int16).numpy() & 0x7FFF).max() < 0x7F80)
    values = tensor.numpy()
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))  # NaN is the minimum of what has one


class TensorSource(Mapping[str, Tensor]):
    """Tensors by name, of which each, or a part of it, is made on access."""

    @abstractmethod
    def meta(self) -> dict[str, Tensor]:
        """Return dtype and shape of every tensor, as tensors without data."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in row-major order, 1-D, without the rest of the tensor."""


class TensorFiles(TensorSource):
    """Tensors of one group of a verified checkpoint by name, read from disk on access, whole or in part.

    A file is opened when the first slice in it is read.
    """

    def __init__(self, tensors: Mapping[str, tuple[SlicedTensor, _Files]]):
        self._tensors = tensors

    @classmethod
    def open(cls, checkpoint: Checkpoint, group: str) -> TensorFiles:
        """Return the tensors of `group`.

        It is a `DataError` if there is no such group, or in format 1 if a file is not safetensors or a name occurs
        twice.
        """
        tensors = cls.find(checkpoint, group)
        if tensors is None:
            files = truncate(", ".join(checkpoint.files), 400)
            raise DataError(f"{checkpoint.path} has no {group}.safetensors; it has {files}")
        return tensors

    @classmethod
    def find(cls, checkpoint: Checkpoint, group: str) -> TensorFiles | None:
        """Return the tensors of `group` as `open` does, but None if the checkpoint has none."""
        if checkpoint.tensors is None:
            return cls._find_whole(checkpoint, group)
        sliced = checkpoint.tensors.get(group)
        if sliced is None:
            return None
        files = _Files([checkpoint.path / sliced.file_name(group, index) for index in range(sliced.files)])
        return cls({name: (tensor, files) for name, tensor in sliced.tensors.items()})

    @classmethod
    def _find_whole(cls, checkpoint: Checkpoint, group: str) -> TensorFiles | None:
        """Return the tensors of a group in format 1, where each is whole in one file."""
        pattern = re.compile(rf"{re.escape(group)}(-\d{{5,}}-of-\d{{5,}})?\.safetensors")
        names = sorted(name for name in checkpoint.files if pattern.fullmatch(name))
        if not names:
            return None
        return cls.of_files([checkpoint.file(name) for name in names])

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> TensorFiles:
        """Return the tensors of safetensors files, each of which is whole in one of them.

        A file that is not safetensors, or a tensor name that occurs twice, is a `DataError`.
        """
        files = _Files(paths)
        tensors: dict[str, tuple[SlicedTensor, _Files]] = {}
        for index, path in enumerate(paths):
            for key, dtype, shape in files.entries(index):
                if key in tensors:
                    raise DataError(
                        f"{path.parent}: {display_name(key)} occurs twice, in {path.name} and in another file"
                    )
                tensors[key] = SlicedTensor(dtype, shape, ((0, index),)), files
        return cls(tensors)

    def filter(self, predicate: Callable[[str], bool]) -> TensorFiles:
        """Return the tensors whose names satisfy `predicate`."""
        return TensorFiles({name: entry for name, entry in self._tensors.items() if predicate(name)})

    def overlay(self, other: TensorFiles) -> TensorFiles:
        """Return these tensors with those of `other`, which replace equal names."""
        return TensorFiles({**self._tensors, **other._tensors})

    def with_empty(self, names: Sequence[str]) -> TensorFiles:
        """Return these tensors and float32 tensors without elements."""
        empty = SlicedTensor("F32", (0,), ()), _Files([])
        return TensorFiles({**self._tensors, **dict.fromkeys(names, empty)})

    def meta(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
            for name, (tensor, _) in self._tensors.items()
        }

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in row-major order, 1-D, reading no other rows.

        A file that is not safetensors, or does not have the slice that the manifest says, is a `DataError`.
        """
        tensor, files = self._tensors[name]
        parts = [files.read(name, tensor, *piece, start, stop) for piece in tensor.overlapping(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[tensor.dtype])

    def check(self) -> None:
        """Check that every file has exactly the slices of the manifest; a `DataError` names the first other tensor."""
        for files in {id(files): files for _, files in self._tensors.values()}.values():
            files.check({name: tensor for name, (tensor, holder) in self._tensors.items() if holder is files})

    def __getitem__(self, name: str) -> Tensor:
        tensor, _ = self._tensors[name]
        return self.read(name, 0, tensor.numel).view(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def meta_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the names, dtypes and shapes of `tensors`, without making those of a `TensorSource`."""
    return tensors.meta() if isinstance(tensors, TensorSource) else tensors


def read_range(tensors: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a tensor in row-major order, 1-D."""
    if isinstance(tensors, TensorSource):
        return tensors.read(name, start, stop)
    return tensors[name].reshape(-1)[start:stop]


class _Files:
    """Safetensors files of a group by number, opened on access; they are memory-mapped, so no file stays open."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = paths
        self._open: dict[int, Any] = {}

    def entries(self, index: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, dtype and shape of every tensor in a file; DataError if it is not safetensors."""
        file = self._get(index)
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            if (dtype := part.get_dtype()) not in DTYPES:
                raise DataError(f"{self._paths[index]}: {display_name(name)} has type {short_repr(dtype)}")
            yield name, dtype, tuple(part.get_shape())

    def read(
        self, name: str, tensor: SlicedTensor, index: int, slice_start: int, slice_stop: int, start: int, stop: int
    ) -> Tensor:
        """Return the elements of [start, stop) that are in the slice of `tensor` in a file, 1-D."""
        start, stop = max(start, slice_start) - slice_start, min(stop, slice_stop) - slice_start
        file, shape = self._get(index), tensor.slice_shape(slice_start, slice_stop)
        try:
            part = file.get_slice(name)
            if (part.get_dtype(), tuple(part.get_shape())) != (tensor.dtype, shape):
                found = f"{part.get_dtype()} {short_repr(part.get_shape())}"
                raise DataError(
                    f"{self._paths[index]}: {display_name(name)} is {found}, expected {tensor.dtype} {list(shape)}"
                )
            if not shape:
                return file.get_tensor(name).view(1)
            row = (slice_stop - slice_start) // shape[0]
            first = start // row
            return part[first : -(-stop // row)].reshape(-1)[start - first * row : stop - first * row]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DataError(
                f"cannot read {display_name(name)} of {self._paths[index]}: {display_name(str(error))}"
            ) from error

    def check(self, tensors: Mapping[str, SlicedTensor]) -> None:
        """Raise `DataError` unless the files have the slices of `tensors`, and nothing else."""
        expected: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, tensor in tensors.items():
            for index in tensor.files:
                shape = tensor.slice_shape(*tensor.slice_in(index))
                expected.setdefault(index, {})[name] = tensor.dtype, shape
        for index, slices in sorted(expected.items()):
            found = {name: (dtype, shape) for name, dtype, shape in self.entries(index)}
            for name in sorted(found.keys() | slices.keys()):
                if found.get(name) != slices.get(name):
                    raise DataError(
                        f"{self._paths[index]}: {display_name(name)} is {short_repr(found.get(name, 'missing'))}, "
                        f"expected {short_repr(slices.get(name, 'no such tensor'))}"
                    )

    def _get(self, index: int) -> Any:
        if index not in self._open:
            try:
                self._open[index] = safe_open(self._paths[index], framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise DataError(f"cannot read {self._paths[index]}: {display_name(str(error))}") from error
        return self._open[index]
