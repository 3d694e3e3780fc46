"""Every change to the bytes of a real checkpoint is detected, and the changed file is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.errors import DataError
from tests.helpers.tiny_config import TINY

PAGE = 4096
MUTATIONS = 1000


def flip(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def overwrite(data: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(data)), draw.randrange(1, 64)
    return (data[:at] + draw.randbytes(length) + data[at + length :])[: len(data)]


def insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.randbytes(draw.randrange(1, 64)) + data[at:]


def delete(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data))
    return data[:at] + data[at + draw.randrange(1, 64) :]


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def swap_blocks(data: bytes, draw: random.Random) -> bytes:
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(4))
    a, b, c, d = cuts
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def zero_a_page(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data)) // PAGE * PAGE
    return data[:at] + bytes(len(data[at : at + PAGE])) + data[at + PAGE :]


def append(data: bytes, draw: random.Random) -> bytes:
    return data + draw.choice([b"\0", b"\n", b" ", draw.randbytes(PAGE)])


OF_ONE_FILE: list[Callable[[bytes, random.Random], bytes]] = [
    flip,
    overwrite,
    insert,
    delete,
    truncate,
    swap_blocks,
    zero_a_page,
    append,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """The checkpoint of a short training run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "config.yaml").write_text(TINY.format(run=folder / "run", store=tiny_store), encoding="utf-8")
    assert train.main([str(folder / "config.yaml"), "train.steps=2", "validation.every=0"]) == 0
    return folder / "run" / "checkpoints" / "step-00000002"


def mutated(original: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """New content of the files that are changed."""
    kind = draw.choice([*OF_ONE_FILE, None])
    while True:
        if kind is None:
            one, other = draw.sample(sorted(original), 2)
            return {one: original[other], other: original[one]}
        name = draw.choice(sorted(original))
        if (data := kind(original[name], draw)) != original[name]:
            return {name: data}


def test_mutated_bytes_are_detected(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000002"
    shutil.copytree(trained, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    original = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    assert {"manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"} <= original.keys()
    draw = random.Random(0)
    for number in range(MUTATIONS):
        changed = mutated(original, draw)
        for name, data in changed.items():
            (folder / name).write_bytes(data)
        with pytest.raises(DataError) as refused:
            verify_checkpoint(folder)
        assert any(str(folder / name) in str(refused.value) for name in changed), (number, refused.value)
        for name in changed:
            (folder / name).write_bytes(original[name])
    assert verify_checkpoint(folder).step == 2, "it is the mutations that were refused"
