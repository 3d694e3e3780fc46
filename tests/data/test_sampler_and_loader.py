"""The order of samples is a function of seed and position, on any number of ranks and workers."""

from __future__ import annotations

import pickle
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.batch import Batch, BatchSize
from mmldlm.data.batch_schedule import TrainConfig, deal
from mmldlm.data.loader import DataConfig, Loader, fixed_batches
from mmldlm.data.mixture import open_data
from mmldlm.data.sampler import SampleOrder, make_sample_order, permute
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.stores import random_letters_store


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 4097])
def test_permute_differs_by_seed_and_epoch(n: int) -> None:
    index = np.arange(n)
    images = permute(index, n, seed=3, epoch=1)
    assert np.array_equal(np.sort(images), index)
    assert np.array_equal(permute(index[::-1], n, 3, 1), images[::-1])
    if n >= 64:
        for other in (permute(index, n, 4, 1), permute(index, n, 3, 2), index):
            assert (other == images).mean() < 0.1


def test_permute_is_uniform_over_positions() -> None:
    places = np.stack([permute(np.arange(16), 16, seed, 0) for seed in range(2000)])
    counts = np.stack([np.bincount(places[:, i], minlength=16) for i in range(16)])
    assert counts.min() > 70 and counts.max() < 190  # 125 expected, standard deviation 11


@pytest.mark.parametrize(("n", "window", "block"), [(1000, 128, 16), (100, 4096, 64), (257, 256, 7), (1, 4, 2)])
def test_each_sample_is_read_once_per_epoch(n: int, window: int, block: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, n).astype(np.int32)
    order = SampleOrder(lengths, seed=7, window=window, block=block)
    stream = order.take(0, 3 * n)
    for epoch in range(3):
        assert np.array_equal(np.sort(stream[epoch * n : (epoch + 1) * n]), np.arange(n))
    if n > 10:
        assert not np.array_equal(stream[:n], stream[n : 2 * n])
    for start, count in [(0, 1), (n // 2, n), (n - 1, 2), (window - 1, 3), (2 * n, 0), (17, 2 * n - 17)]:
        start = min(start, 3 * n)
        count = max(0, min(count, 3 * n - start))
        assert np.array_equal(SampleOrder(lengths, 7, window, block).take(start, count), stream[start : start + count])


def test_neighbors_have_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 8192).astype(np.int32)
    stream = lengths[SampleOrder(lengths, seed=0).take(0, 8192)].reshape(-1, 64)
    assert np.ptp(stream, axis=1).mean() < 12
    assert np.corrcoef(stream.mean(axis=1)[:-1], stream.mean(axis=1)[1:])[0, 1] < 0.3, "blocks are not shuffled"


def loader(store: Store, global_batch: int = 64, micro: int = 8, rank: int = 0, world: int = 1, **config) -> Loader:  # type: ignore[no-untyped-def]
    return Loader(store, "train", DataConfig(**config), 5, constant_batch_size(global_batch, micro), rank, world)


def equal(one: Batch, other: Batch) -> bool:
    tensors = ("tokens", "latents", "sample_ids", "slots")
    return one.lengths == other.lengths and all(torch.equal(getattr(one, t), getattr(other, t)) for t in tensors)


def test_abandoned_iterator_leaves_no_workers(store: Store) -> None:
    reader = loader(store, num_workers=2)
    next(reader.steps(0, 12))
    (step, batches), *_ = reader.steps(7, 8)
    assert step == 7 and equal(batches[0], next(loader(store).steps(7, 8))[1][0])


def test_ranks_get_nearly_equal_tokens_at_every_micro_step() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 512)
    counts = np.stack([lengths[slots].sum(axis=0) for slots in deal(lengths, BatchSize(512, 16), 8, 1)])
    assert counts.shape == (4, 8) and (np.ptp(counts, axis=1) <= 0.03 * counts.max(axis=1)).all()


def test_fixed_batches_give_slots_in_the_order_asked_for(store: Store) -> None:
    split = store.split("validation")
    indices = np.array([5, 3, 9, 0, 7])
    batches = list(fixed_batches(split, indices, 2))
    assert [len(batch.lengths) for batch in batches] == [2, 2, 1]
    lengths = [length for batch in batches for length in batch.lengths]
    assert lengths == sorted(lengths)
    for batch in batches:
        assert np.array_equal(indices[batch.slots.numpy()], batch.sample_ids.numpy())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_named_in_one_line(store_path: Path, tmp_path: Path, workers: int) -> None:
    shutil.copytree(store_path, tmp_path / "store")
    latents = np.load(tmp_path / "store/train-00000.latents.npy", mmap_mode="r+")
    latents[17, 0, 3] = np.nan
    latents.flush()
    damaged = Store.open(tmp_path / "store")
    with pytest.raises(DataError, match=r"train-00000.latents.npy: sample 17 ") as error:
        list(loader(damaged, num_workers=workers).steps(0, 20))
    assert "\n" not in str(error.value)


def test_loader_state_is_small_when_pickled(store: Store) -> None:
    split = pickle.loads(pickle.dumps(store.split("train")))
    assert len(pickle.dumps(store)) < 1000 and len(pickle.dumps(split)) < 1000
    assert np.array_equal(split.tokens(3), store.split("train").tokens(3))


# --- ranks, workers and steps ---------------------------------------------------------------------

RAMP = {3: {"global_batch_size": 16, "micro_batch_size": 2}, 5: {"micro_batch_size": 4}, 7: {"global_batch_size": 64}}
SCENARIOS: dict[str, TrainConfig] = {
    "samples": TrainConfig(global_batch_size=32, micro_batch_size=8),
    "tokens": TrainConfig(global_batch_size=32, micro_batch_tokens=60),
    "ramp": TrainConfig(global_batch_size=8, batch_schedule=RAMP),
    "mixture": TrainConfig(global_batch_size=16, micro_batch_size=4),
    "bad samples": TrainConfig(global_batch_size=48, micro_batch_size=12),
}


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (4, 1)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_together_read_the_samples_of_each_step(
    scenario: str, world: int, workers: int, store: Store, tmp_path: Path
) -> None:
    """By slot, those of the order; in micro-batches that are as announced; from any step on."""
    train, skipped = SCENARIOS[scenario], [0, 1, 17, 39]
    if scenario == "mixture":
        sizes = {"one": 300, "two": 40, "three": 7}
        paths = [random_letters_store(tmp_path / name, count, seed) for seed, (name, count) in enumerate(sizes.items())]
        store = open_data(dict(zip(map(str, paths), (0.7, 0.2, 0.1), strict=True)))
    store = store.without({"train": skipped}) if scenario == "bad samples" else store
    split, latent = store.split("train"), store.manifest.latent
    order, config = make_sample_order(split, 5, 64), DataConfig(num_workers=workers, window=64)
    train.check_batches(world)
    batch_at = partial(train.batch_at, world_size=world)
    loaders = [Loader(store, "train", config, 5, batch_at, rank, world) for rank in range(world)]
    read: list[int] = []
    for start, stop, position in [(0, 16, None), (5, 9, train.samples_before(5))]:  # with the same workers again
        for together in zip(*(loader.steps(start, stop, position) for loader in loaders), strict=True):
            step = together[0][0]
            size, first = batch_at(step), train.samples_before(step)
            tokens = loaders[0].micro_batch_tokens(first, size)
            samples: dict[int, int] = {}
            for rank, (_, batches) in enumerate(together):
                counts = [len(batch.lengths) for batch in batches]
                assert counts == [len(batch.lengths) for batch in together[0][1]]
                assert size.micro_batch_tokens or counts == [size.micro_batch_size] * size.accumulation(world)
                assert tokens[rank].tolist() == [
                    len(batch.tokens) + count * latent.tokens for batch, count in zip(batches, counts, strict=True)
                ]
                for batch, count in zip(batches, counts, strict=True):
                    assert list(batch.lengths) == sorted(batch.lengths)
                    in_batch = len(batch.tokens) + count * latent.tokens
                    assert count == 1 or not size.micro_batch_tokens or in_batch <= size.micro_batch_tokens
                    raw_tokens, lengths, raw_latents = split.gather(batch.sample_ids.numpy())
                    assert np.array_equal(batch.tokens.numpy(), raw_tokens) and batch.lengths == tuple(lengths.tolist())
                    assert np.array_equal(batch.latents.numpy(), latent.standardize(raw_latents))
                    samples.update(zip(batch.slots.tolist(), batch.sample_ids.tolist(), strict=True))
            expected = order.take(first, size.global_batch_size).tolist()
            assert [samples[slot] for slot in range(size.global_batch_size)] == expected
            read += expected
    if scenario == "bad samples":
        assert not set(read) & set(skipped) and set(read[: len(order)]) == set(range(len(split))) - set(skipped)
