"""Micro-batches that the loader's workers corrupt: the same as in the main process, in one buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm.batch import INDEX_TENSORS, Batch
from mmldlm.config import load_config
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.diffusion.corruption import Corruption, StaticSizes
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.loading.factory import build_corruption, build_objective
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.noised_batch import noised_batch

pytestmark = pytest.mark.quick


def tensors(batch: NoisedBatch) -> dict[str, Tensor]:
    own = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return own | {
        name: getattr(batch.layout, name) for name in INDEX_TENSORS if getattr(batch.layout, name) is not None
    }


def assert_same(one: NoisedBatch, other: NoisedBatch) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys() and len(ours) >= 17 and one.layout.lengths == other.layout.lengths
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("mode", ["l2t", "t2l", "joint"])  # t2l masks no token
@pytest.mark.parametrize("latent_tokens", [1, 3])
def test_a_packed_batch_is_the_batch(mode: Any, latent_tokens: int) -> None:
    _, noised = noised_batch(mode, latent_tokens)
    received = NoisedBatch.from_packed(noised.packed, noised.layout, noised.counts, noised.sample_ids)
    storages = {tensor.untyped_storage().data_ptr() for tensor in received.tensors().values()}
    assert storages == {noised.packed.buffer.untyped_storage().data_ptr()} and received.packed is noised.packed
    assert_same(received, noised)
    other = replace(received, positions=noised.positions.flip(0))
    assert torch.equal(other.packed.tensors()["positions"], other.positions), "not those of the other buffer"


class Copies(TorchDispatchMode):
    """Counts the copies to another device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and isinstance(args[0], Tensor) and out.device != args[0].device:
            self.count += 1
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_one_copy_takes_a_batch_to_the_device(packed: bool) -> None:
    """The meta device stands for a GPU; what the network reads of the layout is there as well."""
    _, noised = noised_batch("joint", 3)
    received = NoisedBatch.from_packed(noised.packed, noised.layout, noised.counts, noised.sample_ids)
    with Copies() as copies:
        moved = (received if packed else replace(noised)).to("meta")
        on_device = tensors(moved)
    assert copies.count == 1
    stays = {"counts", "sample_ids"}
    assert {name for name, tensor in on_device.items() if tensor.device.type == "cpu"} == stays
    assert {name: tensor.shape for name, tensor in on_device.items()} == {
        name: tensor.shape for name, tensor in tensors(noised).items()
    }
    assert noised.to("cpu") is noised


Setup = tuple[Corruption, Callable[..., Loader]]


@pytest.fixture
def setup(tiny_store: Path) -> Setup:
    given = [f"data.path={tiny_store}", "data.persistent_workers=false", "run.seed=3", "train.global_batch_size=16"]
    config, store = load_config(None, given), Store.open(tiny_store)
    corruption = build_corruption(config, build_objective(config, store.manifest))

    def loader(workers: int, device_type: str = "cpu", sizes: StaticSizes | None = None) -> Loader:
        data = load_config(None, [f"data.num_workers={workers}", "data.pin_memory=false"]).data
        corrupt = replace(corruption, sizes=sizes)
        return Loader(store, "train", data, 3, constant_batch_size(16, 4), device_type=device_type, corrupt=corrupt)

    return corruption, loader


@pytest.mark.parametrize("sizes", [None, StaticSizes(32)])
def test_workers_corrupt_as_the_main_process_does(setup: Setup, sizes: StaticSizes | None) -> None:
    corruption, loader = setup
    corrupt = replace(corruption, sizes=sizes)
    for (step, batches), (_, plain) in zip(loader(2, sizes=sizes).steps(3, 6), loader(0).steps(3, 6), strict=True):
        assert all(isinstance(batch, Batch) for batch in plain)
        ours, theirs = corrupt(step, batches), corrupt(step, plain)
        for batch, one, other in zip(batches, ours, theirs, strict=True):
            assert one is batch, "a batch that the loader has noised stays as it is"
            assert one.packed.places == other.packed.places and (one.layout.num_filler > 0) == (sizes is not None)
            assert_same(one, other)
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors(batch).values()}
            assert len(storages) == 1, "more than one buffer came from the worker"


def test_for_a_gpu_the_loader_corrupts_without_workers(setup: Setup) -> None:
    corruption, loader = setup
    ((step, batches),), ((_, plain),) = (list(loader(0, device).steps(3, 4)) for device in ("cuda", "cpu"))
    assert all(isinstance(batch, NoisedBatch) for batch in batches)
    for one, other in zip(corruption(step, batches), corruption(step, plain), strict=True):
        assert_same(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_reach_a_gpu_unchanged() -> None:
    _, noised = noised_batch("joint", 3)
    pinned = noised.pin_memory()
    assert pinned.packed.buffer.is_pinned()
    moved = pinned.to("cuda")
    assert all(torch.equal(tensor.cpu(), tensors(noised)[name]) for name, tensor in tensors(moved).items())
