"""Groups of named tensors ("model", "optimizer") in the safetensors files of a checkpoint.

A single process writes `model.safetensors`. Each of N processes writes the tensors that it owns, unsharded, to
`model-00001-of-0000N.safetensors`, so that any number of processes under any engine can read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmldlm.checkpoint.manifest import Checkpoint
from mmldlm.errors import DataError, NumericalError, StorageError
from mmldlm.utils.short_repr import display_name, truncate


def tensor_file_name(group: str, rank: int, world_size: int) -> str:
    """Return the name of the file that `rank` writes for `group`."""
    return f"{group}.safetensors" if world_size == 1 else f"{group}-{rank + 1:05}-of-{world_size:05}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to a safetensors file.

    Raises:
        NumericalError: A tensor has non-finite values; no file is created.
        StorageError: The file cannot be written.
    """
    host_tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        # aminmax reads the tensor once, passes NaN on, allocates nothing; isfinite(...).all() takes ten times as long.
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
            raise NumericalError(f"{name} has non-finite values: not saved to {path.name}")
        host = tensor.detach().cpu().contiguous()
        # Tensors that share memory are written separately: safetensors does not support shared storage.
        storage = host.untyped_storage().data_ptr()
        host_tensors[name] = host.clone() if storage in storages else host
        storages.add(storage)
    try:
        save_file(host_tensors, path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


class TensorFiles(Mapping[str, Tensor]):
    """Tensors of one group of a verified checkpoint by name, each read from disk on access."""

    def __init__(self, files: Mapping[str, Any]):
        self._files = files  # tensor name -> open safetensors file

    @classmethod
    def open(cls, checkpoint: Checkpoint, group: str) -> TensorFiles:
        """Open all files of `group`.

        Raises:
            DataError: The group has no file, a file is not safetensors, or a tensor name occurs twice.
        """
        tensors = cls.find(checkpoint, group)
        if tensors is None:
            files = truncate(", ".join(checkpoint.files), 400)
            raise DataError(f"{checkpoint.path} has no {group}.safetensors; it has {files}")
        return tensors

    @classmethod
    def find(cls, checkpoint: Checkpoint, group: str) -> TensorFiles | None:
        """Open all files of `group` as `open` does, but return None if the checkpoint has none."""
        pattern = re.compile(rf"{re.escape(group)}(-\d{{5,}}-of-\d{{5,}})?\.safetensors")
        names = sorted(name for name in checkpoint.files if pattern.fullmatch(name))
        if not names:
            return None
        files: dict[str, Any] = {}
        for name in names:
            file = _open(checkpoint.file(name))
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if key in files:
                    raise DataError(
                        f"{checkpoint.path}: {display_name(key)} occurs twice, in {name} and in another file"
                    )
                files[key] = file
        return cls(files)

    def filter(self, predicate: Callable[[str], bool]) -> TensorFiles:
        """Return the tensors whose names satisfy `predicate`."""
        return TensorFiles({name: file for name, file in self._files.items() if predicate(name)})

    def __getitem__(self, name: str) -> Tensor:
        file = self._files[name]
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DataError(f"cannot read {display_name(name)} of a checkpoint: {display_name(str(error))}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path}: {display_name(str(error))}") from error
