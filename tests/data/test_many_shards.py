"""Very large stores: start-up time depends on the number of shards only, and mapped memory is bounded."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm import train
from mmldlm.batch import Batch
from mmldlm.data import store as mapped
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.manifest import KINDS
from mmldlm.data.store import Shard, Store
from mmldlm.data.verify import verify_part
from mmldlm.errors import DataError
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.metrics import read_metrics
from tests.helpers.operations import count_calls
from tests.helpers.stores import linked_shards_store, many_shards_store, random_letters_store
from tests.helpers.user_errors import refused

SIZES = DataConfig(verify="sizes")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,500 shards of 4 samples."""
    return many_shards_store(tmp_path_factory.mktemp("many") / "store", 2500, 4)


def mapped_of(store: Store) -> int:
    """Arrays of the training split that are mapped now."""
    return sum(len(KINDS & vars(shard).keys()) for shard in store.split("train").shards)


def first_steps(store: Store, stop: int = 3) -> list[Batch]:
    return [batches[0] for _, batches in Loader(store, "train", SIZES, 0, constant_batch_size(64, 64)).steps(0, stop)]


def test_a_store_of_many_shards_opens_and_trains(many: Path, tiny_config: Path, tmp_path: Path) -> None:
    store = Store.open(many)
    assert len(store.split("train")) == 10_000 and mapped_of(store) == 4
    assert train.main([str(tiny_config), f"data.path={many}", "data.verify=sizes", "data.window=128"]) == 0
    losses = [
        record["loss/total"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "train"
    ]
    assert len(losses) == 8


def test_number_of_mapped_arrays_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = many_shards_store(tmp_path / "store", 60, 4)
    whole = first_steps(Store.open(path))
    monkeypatch.setattr(mapped, "max_mapped_arrays", lambda: 50)
    store = Store.open(path)
    for batch, expected in zip(first_steps(store), whole, strict=True):
        assert torch.equal(batch.tokens, expected.tokens) and torch.equal(batch.latents, expected.latents)
        assert 4 < mapped_of(store) <= 50
    assert verify_part(store) == (0, []) and mapped_of(store) <= 50


def test_limit_of_mapped_arrays() -> None:
    assert 100 <= mapped.max_mapped_arrays() <= 40_000


def test_lengths_are_read_from_the_mapped_files(tmp_path: Path) -> None:
    split = Store.open(many_shards_store(tmp_path / "store", 60, 4)).split("train")
    rows = np.random.default_rng(0).integers(0, len(split), 500)
    whole = np.asarray(split.lengths)
    assert np.array_equal(split.lengths[rows], whole[rows]) and split.lengths[rows].dtype == np.int32
    assert len(split.lengths[rows[:0]]) == 0
    tokens, lengths, _ = split.gather(rows)
    assert np.array_equal(lengths, whole[rows]) and len(tokens) == whole[rows].sum()


def test_start_up_does_not_depend_on_the_number_of_samples(tmp_path: Path) -> None:
    """500 shards instead of one: the same memory to a few MiB, and less work than to map their files twice."""
    result = {}
    one = random_letters_store(tmp_path / "one", 100_000, seed=1, longest=8, shard=100_000)
    for shards in (1, 500):
        path = linked_shards_store(one, tmp_path / str(shards), shards)
        first_steps(Store.open(path), 1)
        calls = count_calls(lambda path=path: first_steps(Store.open(path), 1))  # type: ignore[misc]
        tracemalloc.start()
        store = Store.open(path)
        loader = Loader(store, "train", SIZES, 0, constant_batch_size(64, 64))
        next(loader.steps(1000, 1001))
        result[shards] = (calls, tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
        assert len(loader.order) == shards * 100_000
        assert len(pickle.dumps((store, loader.order))) < 2000
    assert result[500][1] < result[1][1] + 5, result
    files = list((tmp_path / "500").glob("*.npy"))
    assert result[500][0] < 2 * count_calls(lambda: [np.load(file, mmap_mode="r") for file in files]), result


@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_offsets_are_named_when_read(tmp_path: Path, workers: int) -> None:
    path = many_shards_store(tmp_path / "store", 3, 50)
    offsets = path / "train-00001.offsets.npy"
    result = np.load(offsets)
    offsets.unlink()
    np.save(offsets, np.where(np.arange(51) == 7, result[5], result))
    store = Store.open(path)
    loader = Loader(store, "train", DataConfig(verify="sizes", num_workers=workers), 0, constant_batch_size(8, 8))
    with pytest.raises(DataError, match=r"^step 0: .*train-00001.offsets.npy: sample [67] has -?\d+ tokens") as error:
        list(loader.steps(0, 30))
    assert "\n" not in str(error.value)
    with refused(DataError, "train-00001.offsets.npy", "6"):
        verify_part(store)
    with refused(DataError, "train-00001.offsets.npy", "6"):
        store.split("train").gather(np.array([56]))


def test_shards_are_mapped_on_demand(many: Path) -> None:
    split = Store.open(many).split("train")
    shard = split.shards[1234]
    assert isinstance(shard, Shard) and not KINDS & vars(shard).keys()
    split.gather(np.array([4 * 1234]))
    assert KINDS & vars(shard).keys() == {"tokens", "offsets", "latents"}
