"""A resumed run continues with the sample after its last, even if the batch size has changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mmldlm import train
from mmldlm.batch import Batch
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.trainer import Trainer
from tests.helpers.batch_sizes import constant_batch_size


def in_order(batches: list[Any]) -> list[int]:
    """The samples of one step as the order has them: by slot."""
    slots, samples = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("slots", "sample_ids"))
    return samples[slots.argsort()].tolist()


@pytest.mark.quick
@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_batch_size_reads_on_where_the_last_ended(store: Store, workers: int) -> None:
    n = len(store.split("train"))
    expected = SampleOrder(store.split("train").lengths, 5).take(0, 4 * n).tolist()
    read: list[int] = []
    step = 0
    for size, steps in [(64, n // 64), (16, 3), (48, n // 48), (8, n // 8)]:  # the last starts in the third epoch
        loader = Loader(store, "train", DataConfig(num_workers=workers), 5, constant_batch_size(size, 8))
        for result, batches in loader.steps(step, step + steps, len(read)):
            assert result == step
            read += in_order(batches)
            step += 1
    assert len(read) > 2.5 * n and read == expected[: len(read)]
    loader = Loader(store, "train", DataConfig(), 5, constant_batch_size(16, 8))
    (first, batches), *_ = loader.steps(3, 4)  # the default position is 3 * 16
    assert first == 3 and in_order(batches) == expected[48:64]


def test_a_resumed_run_reads_each_sample_once(tiny_config: Path, tiny_store: Path) -> None:
    """8 steps of 8, resumed with 4, with 256 across the end of an epoch, and with 128 into the third."""
    read: list[int] = []

    class RecordingTrainer(Trainer):
        def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
            read.extend(in_order(micro_batches))
            return super().corrupt(step, micro_batches)

    split = Store.open(tiny_store).split("train")
    order = SampleOrder(split.lengths, 3)
    samples = done = 0
    settings = [str(tiny_config), "validation.every=0", "schedule.lr=constant", "optim.warmup_steps=1"]
    for steps, size in [(8, 8), (11, 4), (14, 256), (16, 128)]:
        changed = [f"train.steps={steps}", f"train.global_batch_size={size}"]
        arguments = [*settings, *changed, f"data.num_workers={2 * (steps > 14)}"]
        assert train.main(arguments, trainer_cls=RecordingTrainer) == 0
        samples += (steps - done) * size
        done = steps
        assert read == order.take(0, samples).tolist()
    assert samples > 2 * len(split)
