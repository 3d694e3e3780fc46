"""A checkpoint from a single process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mmldlm.checkpoint.slices import SlicedTensor, TensorGroup
from mmldlm.checkpoint.store import CheckpointStore, FileContent, write_files


def save_checkpoint(
    store: CheckpointStore,
    step: int,
    files: Mapping[str, FileContent],
    info: Mapping[str, Any],
    needed_bytes: int = 0,
) -> Path:
    """Save a checkpoint by `begin`, `write_files` and `commit`; return its folder."""
    in_memory = sum(len(content) for content in files.values() if isinstance(content, bytes))
    temporary = store.begin(step, max(needed_bytes, in_memory))
    try:
        return store.commit(temporary, step, write_files(temporary, files), info, whole_tensors(temporary, files))
    finally:
        # After the commit the folder has its final name, and nothing is left to remove.
        shutil.rmtree(temporary, ignore_errors=True)


def whole_tensors(folder: Path, names: Iterable[str]) -> dict[str, TensorGroup]:
    """Describe the tensors of safetensors files, each of which is whole."""
    groups: dict[str, dict[str, SlicedTensor]] = {}
    for match in filter(None, (re.fullmatch(r"(\w+)\.safetensors", name) for name in names)):
        with safe_open(folder / match[0], framework="pt") as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        groups[match[1]] = {
            key: SlicedTensor(part.get_dtype(), tuple(part.get_shape()), ((0, 0),) if 0 not in part.get_shape() else ())
            for key, part in parts.items()
        }
    return {group: TensorGroup(1, tensors) for group, tensors in groups.items()}
