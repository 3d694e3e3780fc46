"""Checkpoints with matching manifests and other tensors: refused in one line, and no code in them is executed."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.retention import Retention
from mmldlm.checkpoint.state import TrainState, load_model_state, load_optimizer_state, model_state, optimizer_state
from mmldlm.checkpoint.store import CheckpointStore
from mmldlm.checkpoint.tensors import TensorFiles, write_tensors
from mmldlm.config import RunConfig, load_config, write_config
from mmldlm.data.store import Store
from mmldlm.diffusion.gaussian import LatentConfig
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.errors import DataError
from mmldlm.loading.compatibility import check_compatible, identity
from mmldlm.loading.load import load_run
from mmldlm.trainer.checkpointer import metadata_files
from mmldlm.trainer.restore import restore_checkpoint
from tests.helpers.changed_checkpoints import replace_file
from tests.helpers.save_checkpoint import save_checkpoint
from tests.helpers.small_model import build_model

Run = tuple[RunConfig, Store, torch.nn.Module, Path]


@pytest.fixture
def run(tiny_config: Path, tiny_store: Path) -> Run:
    """A run folder with one checkpoint, and the network that loads it."""
    config, store = load_config(tiny_config), Store.open(tiny_store)
    model = build_model(config, store.manifest)
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


def is_refused(read: Callable[[], object]) -> bool:
    """Return whether `read` raises a DataError, whose message has one short line."""
    try:
        read()
    except DataError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) <= 2000, str(error)[:3000]
        return True
    return False


class Canary:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "config.yaml"])
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
    assert is_refused(lambda: load_all(run))
    if name == "ema.safetensors":
        assert is_refused(lambda: load_run(config.run.dir))
    assert not canary.exists()


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
        assert (is_refused(lambda: load_all(run))) == refused
        assert (is_refused(lambda: load_run(config.run.dir))) == refused


def tensor(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes = b"", claim: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if claim is None else claim) + raw + data


NOT_SAFETENSORS = {
    "empty": b"",
    "a header of 2^62 bytes": safetensors({}, claim=2**62),
    "overlapping": safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12)),
    "a type of another size": safetensors({"a": tensor("F64", [2], 0, 8)}, bytes(8)),
    "offsets beyond the file": safetensors({"a": tensor("F32", [2**40], 0, 2**42)}, bytes(4)),
}


@pytest.mark.parametrize("kind", NOT_SAFETENSORS)
def test_malformed_state_files_are_refused(run: Run, kind: str) -> None:
    _, _, model, path = run
    for name in ("model.safetensors", "optimizer.safetensors"):
        good = (path / name).read_bytes()
        replace_file(path, name, NOT_SAFETENSORS[kind])
        before = {key: value.clone() for key, value in model_state(model).items()}
        assert is_refused(lambda: load_all(run))
        if name == "model.safetensors":
            assert all(torch.equal(before[key], value) for key, value in model_state(model).items())
        replace_file(path, name, good)
    assert load_all(run) == 1


def load_all(run: Run) -> int:
    config, store, model, path = run
    result = restore_checkpoint(verify_checkpoint(path), model, config, store)
    assert result.weights is not None and result.moments is not None
    load_model_state(model, result.weights)
    assert all(
        average.isfinite().all() for average in (TensorFiles.find(verify_checkpoint(path), "ema") or {}).values()
    )
    load_optimizer_state(build_optimizer(model, config.optim), model, result.moments)
    return result.state.step


SHAPES = [(0,), (2, 2), (1,) * 60]
DTYPES = [torch.int64, torch.bool, torch.uint8, torch.float64]


def test_wrong_shapes_and_types_are_refused(run: Run, tmp_path: Path) -> None:
    """Names are right; shapes or types are wrong, including scalars with several elements or none."""
    path = run[-1]
    checkpoint = verify_checkpoint(path)
    for group in ("model", "optimizer"):
        tensors = dict(TensorFiles.open(checkpoint, group))
        good = (path / f"{group}.safetensors").read_bytes()
        entry = next(name for name, value in tensors.items() if value.ndim == 2)
        hostile = [torch.zeros(shape) for shape in SHAPES]
        hostile += [torch.zeros(tensors[entry].shape).to(dtype) for dtype in DTYPES[: 3 if group == "optimizer" else 4]]
        changes = [{entry: value} for value in hostile]
        if group == "optimizer":
            step = f"{entry.rpartition('/')[0]}/step"
            numbers = [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros(tensors[entry].shape)]
            changes += [{step: value} for value in numbers]
            changes += [{f"{step}:int": torch.zeros(3, dtype=torch.int64)}, {entry: torch.zeros(())}]
        for change in changes:
            save_file({**tensors, **change}, tmp_path / "x")
            replace_file(path, f"{group}.safetensors", (tmp_path / "x").read_bytes())
            assert is_refused(lambda: load_all(run)), change
        replace_file(path, f"{group}.safetensors", good)
    assert load_all(run) == 1


@pytest.mark.parametrize(
    ("key", "expected"), [("latent", "latent.gone is 1 in the checkpoint, 'unset' now"), ("model", "model.gone is 1")]
)
def test_a_setting_of_a_newer_version_is_named(run: Run, key: str, expected: str) -> None:
    config, store, _, path = run
    saved = {**identity(config, store), key: {**identity(config, store)[key], "gone": 1}}
    with pytest.raises(DataError, match=expected):
        check_compatible(replace(verify_checkpoint(path), info={"identity": saved}), config, store)


def test_a_store_of_longer_samples_is_named_with_the_option_that_divides_them(run: Run) -> None:
    config, store, _, path = run
    longer = store.with_manifest(replace(store.manifest, max_length=store.manifest.max_length + 1))
    with pytest.raises(DataError, match=rf"{store.path}.*--max-length {store.manifest.max_length}`"):
        check_compatible(verify_checkpoint(path), config, longer)


def test_a_setting_that_was_added_has_its_default(run: Run) -> None:
    """In checkpoints of earlier versions, which have no such key; but 0.1.0 was the first, and had `time_shift`."""
    config, store, _, path = run
    before = json.loads(json.dumps(identity(config, store)))
    assert before["latent"].pop("prediction") == LatentConfig().prediction
    checkpoint = replace(verify_checkpoint(path), info={"identity": before})
    check_compatible(checkpoint, config, store)
    other = replace(config, latent=replace(config.latent, prediction="v"))
    with pytest.raises(DataError, match=r"latent\.prediction is 'x0' in the checkpoint, 'v' now"):
        check_compatible(checkpoint, other, store)
    assert before["latent"].pop("time_shift") is None
    with pytest.raises(DataError, match=r"latent\.time_shift is missing"):
        check_compatible(checkpoint, config, store)
