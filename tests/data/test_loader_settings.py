"""Loader settings that change no batch: prefetching, persistent workers and pinned memory."""

from __future__ import annotations

import multiprocessing

import pytest

from mmldlm.batch import BatchSize
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.store import Store
from tests.helpers.batch_sizes import constant_batch_size

pytestmark = pytest.mark.quick


@pytest.mark.setting("data.prefetch_factor")
def test_prefetch_factor_is_how_far_ahead_a_worker_is_asked(store: Store) -> None:
    def asked_ahead(factor: int) -> int:
        asked: set[int] = set()

        def batch_at(step: int) -> BatchSize:
            asked.add(step)
            return BatchSize(16, 8)

        steps = Loader(store, "train", DataConfig(num_workers=1, prefetch_factor=factor), 5, batch_at).steps(0, 99, 0)
        next(steps)
        steps.close()
        return len(asked)

    assert asked_ahead(6) == asked_ahead(1) + 5


@pytest.mark.setting("data.persistent_workers")
@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_read_on(store: Store, persistent: bool) -> None:
    config = DataConfig(num_workers=1, persistent_workers=persistent)
    loader = Loader(store, "train", config, 5, constant_batch_size(16, 8))
    workers = []
    for start in (0, 2):
        steps = loader.steps(start, start + 2)
        next(steps)
        workers.append({process.pid for process in multiprocessing.active_children()})
        assert len(list(steps)) == 1
    assert (workers[0] == workers[1]) == persistent and len(workers[1]) == 1


@pytest.mark.setting("data.pin_memory")
@pytest.mark.parametrize(
    ("device", "asked", "pinned"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_pin_memory_is_for_gpus(store: Store, device: str, asked: bool, pinned: bool) -> None:
    loader = Loader(
        store, "train", DataConfig(num_workers=0, pin_memory=asked), 5, constant_batch_size(16, 8), device_type=device
    )
    assert loader._loader.pin_memory is pinned
