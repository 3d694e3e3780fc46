"""Tensors in slices: any number of readers for any writers, and no file with other slices than its manifest says."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmldlm.checkpoint.manifest import MANIFEST, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.slices import SlicedTensor, TensorGroup, tensor_file_name
from mmldlm.checkpoint.store import CheckpointStore, write_files
from mmldlm.checkpoint.tensors import TensorFiles, write_tensors
from mmldlm.errors import DataError
from tests.helpers.changed_checkpoints import HASH, manifest_body, seal

pytestmark = pytest.mark.quick
CASES = 60


def save(folder: Path, group: TensorGroup, tensors: dict[str, Tensor]) -> Path:
    """Save a checkpoint as `group.files` processes do, each of which has its slices only."""
    store, contents = CheckpointStore(folder, Retention(last=1)), {}
    temporary = store.begin(1, 0)
    for writer in range(group.files):
        parts = {name: (tensor, *tensor.slice_in(writer)) for name, tensor in group.tensors.items()}
        written = {
            name: tensors[name].flatten()[start:stop].reshape(tensor.slice_shape(start, stop))
            for name, (tensor, start, stop) in parts.items()
            if start < stop
        }
        if written:
            name = tensor_file_name("model", writer, group.files)
            contents |= write_files(temporary, {name: lambda path, own=written: write_tensors(path, own)})
    return store.commit(temporary, 1, contents, {}, {"model": group})


def random_slices(rng: random.Random, shape: tuple[int, ...], world: int) -> int | tuple[tuple[int, int], ...]:
    """Rows as FSDP2's, flat parts as ZeRO-3's, ranges as ZeRO-1's, or all of it at one rank."""
    numel = torch.Size(shape).numel()
    kind = rng.randrange(4) if shape else 3
    if kind == 0:
        return -(-shape[0] // world) * torch.Size(shape[1:]).numel()
    if kind == 1:
        return -(-numel // world)
    if kind == 2:
        cuts = sorted(rng.sample(range(1, numel), min(rng.randrange(world), numel - 1)))
        return tuple(zip([0, *cuts], sorted(rng.sample(range(world), len(cuts) + 1)), strict=True))
    return ((0, rng.randrange(world)),)


@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_readers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for case in range(CASES // 6):
        writers, readers = rng.randint(1, 7), rng.randint(1, 7)
        tensors, sliced = {"empty": torch.empty(0, 3)}, {"empty": SlicedTensor("F32", (0, 3), ())}
        for number in range(rng.randint(1, 5)):
            shape = tuple(rng.randint(1, 6) for _ in range(rng.randrange(4)))
            tensor = torch.randn(shape).to(rng.choice([torch.float32, torch.bfloat16]))
            tensors[f"{number}.w"] = tensor
            sliced[f"{number}.w"] = SlicedTensor.like(tensor, random_slices(rng, shape, writers))
        path = save(tmp_path / str(case), TensorGroup(writers, sliced), tensors)
        files = TensorFiles.open(verify_checkpoint(path), "model")
        assert files.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert files[name].dtype == tensor.dtype and files[name].equal(tensor), sliced[name]
            assert (files.meta()[name].shape, files.meta()[name].dtype) == (tensor.shape, tensor.dtype)
            chunk = -(-tensor.numel() // readers)
            parts = [files.read(name, i * chunk, min((i + 1) * chunk, tensor.numel())) for i in range(readers)]
            assert torch.cat(parts).equal(tensor.flatten()), sliced[name]


def test_a_reader_opens_only_files_with_its_own_slices(tmp_path: Path) -> None:
    tensor = torch.arange(40.0).view(8, 5)
    path = save(tmp_path, TensorGroup(4, {"w": SlicedTensor.like(tensor, 10)}), {"w": tensor})
    files = TensorFiles.open(verify_checkpoint(path), "model")
    for other in (0, 3):
        (path / tensor_file_name("model", other, 4)).unlink()
    assert files.read("w", 12, 27).equal(torch.arange(12.0, 27.0))
    with pytest.raises(DataError, match=r"model-0000[12]-of-00004"):
        files.read("w", 5, 12)


def test_files_with_other_slices_are_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.arange(40.0).view(8, 5)
    saved = TensorGroup(2, {"w": SlicedTensor.like(tensor, 20), "v": SlicedTensor.like(tensor, ((0, 1),))})
    path = save(tmp_path, saved, {"w": tensor, "v": tensor})
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("w", {"slices": 25}),  # elements that no file has
        ("w", {"slices": [[0, 0], [10, 1]]}),  # elements that both files have
        ("w", {"slices": [[0, 1]]}),
        ("w", {"shape": [5, 8]}),
        ("w", {"dtype": "I32"}),
        ("v", {"slices": [[0, 0]]}),
    ]
    body = manifest_body(path)
    for name, change in wrong:
        tensors = body["tensors"]["model"]["tensors"]
        changed = {"model": {"files": 2, "tensors": {**tensors, name: {**tensors[name], **change}}}}
        seal(path, {**body, "tensors": changed})
        files = TensorFiles.open(verify_checkpoint(path), "model")
        with pytest.raises(DataError, match=rf"\b{name}\b.*model-0000\d-of-00002|model-0000\d-of-00002.*\b{name}\b"):
            files[name]


def test_manifest_of_a_thousand_ranks_is_small(tmp_path: Path) -> None:
    """606 tensors with two moments, a step count and an average each, on 1,024 ranks."""
    shapes = {f"blocks.{n // 19}.latent.attention.part{n % 19}.weight": (4096, 4096) for n in range(606)}
    even = {name: SlicedTensor("F32", shape, 4 * 4096) for name, shape in shapes.items()}
    step = SlicedTensor("F32", (), ((0, 0),))
    moments = {f"{name}/{key}": tensor for name, tensor in even.items() for key in ("exp_avg", "exp_avg_sq")}
    groups = {"model": even, "optimizer": moments | {f"{name}/step": step for name in even}, "ema": even}
    body = {
        "tensors": {name: asdict(TensorGroup(1024, tensors)) for name, tensors in groups.items()},
        "files": {
            tensor_file_name(name, rank, 1024): {"bytes": 10**9, "sha256": HASH}
            for name in groups
            for rank in range(1024)
        },
    }
    seal(tmp_path, body)
    assert (tmp_path / MANIFEST).stat().st_size < 2 * 2**20
    assert len(json.loads((tmp_path / MANIFEST).read_text())["files"]) == 3072
