"""The order of samples is a function of seed and position, on any number of ranks and workers."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.batch import Batch
from mmldlm.data.batch_schedule import BatchSize, deal
from mmldlm.data.loader import DataConfig, Loader, fixed_batches
from mmldlm.data.sampler import SampleOrder, permute
from mmldlm.data.store import Store
from mmldlm.errors import DataError
from tests.helpers.batch_sizes import constant_batch_size

pytestmark = pytest.mark.quick


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


def test_workers_change_nothing_and_any_step_can_be_resumed(store: Store) -> None:
    alone = dict(loader(store).steps(0, 12))
    with_workers = loader(store, num_workers=2)
    for start, stop in [(0, 12), (5, 9)]:  # the second call uses the persistent workers again
        result = dict(with_workers.steps(start, stop))
        assert list(result) == list(range(start, stop))
        for step, batches in result.items():
            assert len(batches) == 8
            assert all(equal(one, other) for one, other in zip(batches, alone[step], strict=True))


def test_abandoned_iterator_leaves_no_workers(store: Store) -> None:
    reader = loader(store, num_workers=2)
    next(reader.steps(0, 12))
    (step, batches), *_ = reader.steps(7, 8)
    assert step == 7 and equal(batches[0], next(loader(store).steps(7, 8))[1][0])


def test_every_world_size_reads_the_same_global_batches(store: Store) -> None:
    split = store.split("train")
    for step in (0, 3, 11):
        expected = SampleOrder(split.lengths, 5).take(step * 64, 64)
        for world, micro in [(1, 8), (2, 4), (4, 2), (8, 8), (2, 32)]:
            slots: dict[int, int] = {}
            tokens = []
            for rank in range(world):
                batches = next(loader(store, 64, micro, rank, world).steps(step, step + 1))[1]
                tokens.append(sum(len(batch.tokens) for batch in batches))
                for batch in batches:
                    assert len(batch.lengths) == micro and list(batch.lengths) == sorted(batch.lengths)
                    slots.update(zip(batch.slots.tolist(), batch.sample_ids.tolist(), strict=True))
            assert [slots[slot] for slot in range(64)] == expected.tolist()
            assert max(tokens) - min(tokens) <= int(split.lengths[expected].max())


def test_ranks_get_nearly_equal_tokens_at_every_micro_step() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 512)
    counts = np.stack([lengths[slots].sum(axis=0) for slots in deal(lengths, BatchSize(512, 16), 8, 1)])
    assert counts.shape == (4, 8) and (np.ptp(counts, axis=1) <= 0.03 * counts.max(axis=1)).all()


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (2, 4), (4, 8), (8, 1)])
def test_token_counts_of_all_ranks_are_known(store: Store, world: int, micro: int) -> None:
    for step in (0, 5):
        tokens = loader(store, 32, micro, 0, world).micro_batch_tokens(step * 32, BatchSize(32, micro))
        assert tokens.shape == (world, 32 // (micro * world))
        for rank in range(world):
            ((_, batches),) = loader(store, 32, micro, rank, world).steps(step, step + 1)
            latent_tokens = micro * store.manifest.latent.tokens
            assert tokens[rank].tolist() == [len(batch.tokens) + latent_tokens for batch in batches]


def test_batches_hold_the_stored_samples_standardized(store: Store) -> None:
    split = store.split("train")
    squares = []
    for _, batches in loader(store).steps(0, 6):
        for batch in batches:
            assert batch.tokens.dtype == torch.int64 and batch.latents.dtype == torch.float32
            parts = batch.tokens.split(list(batch.lengths))
            for sample, tokens, latents in zip(batch.sample_ids.tolist(), parts, batch.latents, strict=True):
                assert np.array_equal(tokens.numpy(), split.tokens(sample))
                restored = store.restore(latents.numpy())
                assert np.allclose(restored, split.latents(sample), atol=1e-5)
            squares.append(batch.latents.square().sum(-1))
    assert torch.cat(squares).mean().item() == pytest.approx(store.manifest.latent.channels, rel=0.1)


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
