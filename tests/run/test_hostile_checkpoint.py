"""Untrusted checkpoints with matching manifests: refused in one line, and no code in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from mmldlm.checkpoint.manifest import MAX_SMALL_BYTES, verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.state import TrainState, load_model_state, load_optimizer_state, model_state, optimizer_state
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles, write_tensors
from mmldlm.config import RunConfig, load_config, write_config
from mmldlm.data.store import Store
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.errors import DataError
from mmldlm.run.compatibility import identity
from mmldlm.run.factory import build_model
from mmldlm.run.load import load_run
from mmldlm.trainer.checkpointer import metadata_files
from mmldlm.trainer.restore import restore_checkpoint
from tests.helpers.hostile_checkpoints import HASH, manifest_body, read_or_refused, replace_file, seal
from tests.helpers.save_checkpoint import save_checkpoint

quick = pytest.mark.quick
Run = tuple[RunConfig, Store, torch.nn.Module, Path]


@pytest.fixture
def run(tiny_config: Path, tiny_store: Path) -> Run:
    """A run folder with one checkpoint, and the network that loads it."""
    config, store = load_config(tiny_config), Store.open(tiny_store)
    model = build_model(config, store.manifest, "cpu")
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder = Path(config.run.dir)
    folder.mkdir()
    write_config(config, folder)
    path = save_checkpoint(
        CheckpointStore(folder / "checkpoints", Retention(last=1)),
        1,
        {
            "model.safetensors": lambda path: write_tensors(path, model_state(model)),
            "optimizer.safetensors": lambda path: write_tensors(path, optimizer_state(optimizer, model)),
            "ema.safetensors": lambda path: write_tensors(path, dict(model.named_parameters())),
            "state.json": TrainState(step=1).to_json().encode(),
            **metadata_files(config, store),
        },
        {"identity": identity(config, store)},
    )
    return config, store, model, path


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@quick
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json", "config.yaml"]
)
@pytest.mark.parametrize("form", ["pickle", "torch", "text"])
def test_nothing_is_unpickled(run: Run, tmp_path: Path, name: str, form: str) -> None:
    config, _, _, path = run
    canary = tmp_path / "canary"
    if form == "pickle":
        content = pickle.dumps(Canary(canary))
        pickle.loads(content)
        assert canary.exists(), "it would have sung"
        canary.unlink()
    elif form == "torch":
        torch.save({"state": Canary(canary)}, tmp_path / "x.pt")
        content = (tmp_path / "x.pt").read_bytes()
    else:
        content = f"!!python/object/apply:os.system ['touch {canary}']\n".encode()
    assert load_all(run) == 1
    replace_file(path, name, content)
    assert read_or_refused(lambda: load_all(run)) is None
    if name in ("model.safetensors", "ema.safetensors"):
        assert read_or_refused(lambda: load_run(config.run.dir)) is None
    assert not canary.exists()


@quick
@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "type"])
def test_foreign_ema_weights_are_refused(run: Run, fault: str) -> None:
    config, _, model, path = run
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    name = next(name for name in tensors if tensors[name].dim() == 2)
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["stranger"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name].double() if fault == "type" else tensors[name][:-1].clone()
    for wrong in (tensors, dict(model.named_parameters())):
        replace_file(path, "ema.safetensors", save({key: value.detach() for key, value in wrong.items()}))
        refused = wrong is tensors
        assert (read_or_refused(lambda: load_all(run)) is None) == refused
        assert (read_or_refused(lambda: load_run(config.run.dir)) is None) == refused


@quick
@pytest.mark.parametrize("skip", [0.0, 0.1])
def test_checkpoint_with_a_skip_of_x0_loads_if_it_is_zero(run: Run, skip: float) -> None:
    """Networks that predict x0 had a learned skip once; in runs that trained no latents it has stayed zero."""
    config, store, model, path = run
    assert config.latent.prediction == "x0"
    old = {"latent_skip.weight": torch.full((6, 4), skip), "latent_skip.bias": torch.zeros(6)}
    for group in ("model", "ema"):
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        replace_file(path, f"{group}.safetensors", save(tensors | old))
    moments = TensorFiles.open(verify_checkpoint(path), "optimizer")
    entries = {f"{name}/{key}": value.clone() for name, value in old.items() for key in ("exp_avg", "exp_avg_sq")}
    replace_file(path, "optimizer.safetensors", save({name: moments[name] for name in moments} | entries))
    if not skip:
        assert restore_checkpoint(path, model, config, store).state.step == load_run(config.run.dir).step == 1
        return
    for load in (lambda: restore_checkpoint(path, model, config, store), lambda: load_run(config.run.dir)):
        with pytest.raises(DataError, match=r"step-00000001.*latent\.prediction x0.*latent_skip"):
            load()


def tensor(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes = b"", claim: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if claim is None else claim) + raw + data


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}}'
NOT_SAFETENSORS = {
    "empty": b"",
    "a header of 2^62 bytes": safetensors({}, claim=2**62),
    "a header of 200 MB": safetensors({}, claim=200 * 2**20),
    "overlapping": safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12)),
    "a gap": safetensors({"a": tensor("F32", [1], 4, 8)}, bytes(8)),
    "more behind": safetensors({"a": tensor("F32", [1], 0, 4)}, bytes(9)),
    "a type of another size": safetensors({"a": tensor("F64", [2], 0, 8)}, bytes(8)),
    "a type that is none": safetensors({"a": tensor("X\nY" * 1000, [1], 0, 4)}, bytes(4)),
    "a type torch lacks": safetensors({"a": tensor("F6_E2M3", [4], 0, 3)}, bytes(3)),
    "an overflow": safetensors({"a": tensor("F32", [2**62, 2**62], 0, 8)}, bytes(8)),
    "an overflow times zero": safetensors({"a": tensor("F32", [2**63, 2**63, 0], 0, 0)}),
    "a negative size": safetensors({"a": tensor("F32", [-1], 0, 4)}, bytes(4)),
    "offsets beyond the file": safetensors({"a": tensor("F32", [2**40], 0, 2**42)}, bytes(4)),
    "a name that is not UTF-8": safetensors(b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "a name twice": safetensors(TWICE % (4, 8), bytes(8)),
    "a deep header": safetensors(b"[" * 10_000),
    "a name of 1 MB": safetensors({"a" * 2**20: tensor("F32", [1], 0, 4)}, bytes(4)),
    "a name of two lines": safetensors({"a\nb": tensor("F32", [1], 0, 4)}, bytes(4)),
}


@quick
@pytest.mark.parametrize("kind", NOT_SAFETENSORS)
def test_malformed_state_files_are_refused(run: Run, kind: str) -> None:
    _, _, model, path = run
    for name in ("model.safetensors", "optimizer.safetensors"):
        good = (path / name).read_bytes()
        replace_file(path, name, NOT_SAFETENSORS[kind])
        before = {key: value.clone() for key, value in model_state(model).items()}
        assert read_or_refused(lambda: load_all(run)) is None
        if name == "model.safetensors":
            assert all(torch.equal(before[key], value) for key, value in model_state(model).items())
        replace_file(path, name, good)
    assert load_all(run) == 1


def load_all(run: Run) -> int:
    config, store, model, path = run
    result = restore_checkpoint(path, model, config, store)
    assert result.weights is not None and result.moments is not None
    load_model_state(model, result.weights)
    assert all(
        average.isfinite().all() for average in (TensorFiles.find(verify_checkpoint(path), "ema") or {}).values()
    )
    load_optimizer_state(build_optimizer(model, config.optim), model, result.moments)
    return result.state.step


SHAPES = [(0,), (2, 2), (1,) * 60]
DTYPES = [torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e5m2, torch.float64]


@quick
def test_wrong_shapes_and_types_are_refused(run: Run, tmp_path: Path) -> None:
    """Names are right; shapes or types are wrong, including scalars with several elements or none."""
    path = run[-1]
    checkpoint = verify_checkpoint(path)
    for group in ("model", "optimizer"):
        tensors = dict(TensorFiles.open(checkpoint, group))
        good = (path / f"{group}.safetensors").read_bytes()
        entry = next(name for name, value in tensors.items() if value.ndim == 2)
        hostile = [torch.zeros(shape) for shape in SHAPES]
        hostile += [torch.zeros(tensors[entry].shape).to(dtype) for dtype in DTYPES[: 4 if group == "optimizer" else 6]]
        changes = [{entry: value} for value in hostile]
        if group == "optimizer":
            step = f"{entry.rpartition('/')[0]}/step"
            numbers = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(tensors[entry].shape)]
            changes += [{step: value} for value in numbers]
            changes += [{f"{step}:int": torch.zeros(3, dtype=torch.int64)}, {f"{step}:int": torch.tensor(0.5)}]
            changes += [{f"{step}:lambda": torch.zeros(1)}, {entry: torch.zeros(())}]
        for change in changes:
            save_file({**tensors, **change}, tmp_path / "x")
            replace_file(path, f"{group}.safetensors", (tmp_path / "x").read_bytes())
            assert read_or_refused(lambda: load_all(run)) is None, change
        replace_file(path, f"{group}.safetensors", good)
    assert load_all(run) == 1


STATES = [
    b"", b"[]", b"null", b"\xff", b"[" * 10**6, b'{"step": 1e999}', b"9" * 5000, b'{"step": ' + b"9" * 4000 + b"}",
    b'{"' + b"x" * 10**6 + b'": 1}', b'{"a\\nb": 1}',
]  # fmt: skip
FIELDS: list[Any] = [
    -1,
    2**63,
    10**4000,
    1.5,
    True,
    None,
    "1",
    [10**400],
    [True],
    ["x" * 10**5],
    {"a": 1},
    [-1.0] * 10**5,
]


@quick
def test_training_states(run: Run) -> None:
    config, store, model, path = run
    good = json.loads((path / "state.json").read_bytes())
    hostile = [json.dumps({**good, name: value}).encode() for name in good for value in FIELDS]
    for content in [*STATES, *hostile]:
        state = read_or_refused(lambda content=content: TrainState.from_json(content))
        assert state is None or all(isinstance(item, float) for item in state.accepted_norms), content[:200]
    replace_file(path, "state.json", b" " * (MAX_SMALL_BYTES + 1))
    assert read_or_refused(lambda: restore_checkpoint(path, model, config, store)) is None


@quick
@pytest.mark.parametrize("name", ["state.json", "config.yaml"])
def test_large_small_files_are_not_read(run: Run, name: str) -> None:
    config, store, model, path = run
    with (path / name).open("wb") as file:
        file.truncate(2**40)  # of zeros that take no disk: reading it would take all memory
    body = manifest_body(path)
    body["files"][name] = {"bytes": 2**40, "sha256": HASH}
    seal(path, body)
    assert read_or_refused(lambda: restore_checkpoint(path, model, config, store)) is None  # which does not hash


@quick
@pytest.mark.parametrize(
    "value", [{}, [], None, 3, {"model": "x" * 10**6}, {"model": {"width": "\n" * 9000}}, {"data": [[]] * 99}]
)
def test_identities(run: Run, value: Any) -> None:
    config, store, model, path = run
    seal(path, {**manifest_body(path), "info": {"identity": value}})
    assert read_or_refused(lambda: restore_checkpoint(path, model, config, store)) is None


@quick
@pytest.mark.parametrize("kind", ["fifo", "folder", "absent"])
def test_config_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / "config.yaml")
    elif kind == "folder":
        (tmp_path / "config.yaml").mkdir()
    assert read_or_refused(lambda: load_run(tmp_path)) is None
