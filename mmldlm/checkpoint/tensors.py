"""Groups of named tensors ("model", "optimizer") over the files of a checkpoint.

One process writes `model.safetensors`; of N processes each writes the tensors that it owns, whole, into
`model-00001-of-0000N.safetensors`. So any number of processes under any engine can read them.
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
from mmldlm.utils.short_repr import cut, named


def file_name(group: str, rank: int, ranks: int) -> str:
    return f"{group}.safetensors" if ranks == 1 else f"{group}-{rank + 1:05}-of-{ranks:05}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` as safetensors.

    Raises:
        NumericalError: a tensor is not finite; the file is not begun.
        StorageError: the file cannot be written.
    """
    ready: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        # One pass and no memory, where isfinite(...).all() takes ten times as long.
        if tensor.is_floating_point() and tensor.numel() and not torch.isfinite(torch.stack(tensor.aminmax())).all():
            raise NumericalError(f"{name} has values that are not finite: not saved to {path.name}")
        host = tensor.detach().cpu().contiguous()
        # Views of one memory are written as two tensors; the format knows no other way.
        storage = host.untyped_storage().data_ptr()
        ready[name] = host.clone() if storage in seen else host
        seen.add(storage)
    try:
        save_file(ready, path)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one group of a verified checkpoint, each read when it is asked for."""

    def __init__(self, places: Mapping[str, Any]):
        self._places = places

    @classmethod
    def open(cls, checkpoint: Checkpoint, group: str) -> TensorFiles:
        """DataError where the checkpoint has no file of that group, or one that is not safetensors, or a name twice."""
        found = cls.find(checkpoint, group)
        if found is None:
            files = cut(", ".join(checkpoint.files), 400)
            raise DataError(f"{checkpoint.path} has no {group}.safetensors; it has {files}")
        return found

    @classmethod
    def find(cls, checkpoint: Checkpoint, group: str) -> TensorFiles | None:
        """The same, but None where the checkpoint has no file of that group."""
        pattern = re.compile(rf"{re.escape(group)}(-\d{{5,}}-of-\d{{5,}})?\.safetensors")
        names = sorted(name for name in checkpoint.files if pattern.fullmatch(name))
        if not names:
            return None
        places: dict[str, Any] = {}
        for name in names:
            file = _open(checkpoint.file(name))
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                if key in places:
                    raise DataError(f"{checkpoint.path}: {named(key)} is there twice, in {name} and in another file")
                places[key] = file
        return cls(places)

    def where(self, wanted: Callable[[str], bool]) -> TensorFiles:
        return TensorFiles({name: file for name, file in self._places.items() if wanted(name)})

    def __getitem__(self, name: str) -> Tensor:
        file = self._places[name]
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DataError(f"cannot read {named(name)} of a checkpoint: {named(str(error))}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"cannot read {path}: {named(str(error))}") from error
