"""Variants of the ladder opened on a small store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.task import Task
from benchmarks.variants import Open, Variant, opened
from benchmarks.workload import typical_batches
from mmldlm.data.sampler import SampleOrder
from mmldlm.data.store import Store

BATCH = 8


def task_on(store: Path, **given: object) -> Task:
    return Task(store=str(store), width=64, depth=2, heads=1, batch=BATCH, precision="fp32", **given)  # type: ignore[arg-type]


def two_batches(store: Path) -> list[np.ndarray]:
    split = Store.open(store).split("train")
    return typical_batches(SampleOrder(split.lengths, seed=0), split, BATCH, 2)


@contextmanager
def stirred(variant: Variant, store: Path, folder: Path) -> Iterator[Open]:
    """The variant with weights that are a function of their names: at the start, blocks pass their input on."""
    with opened(variant, task_on(store), two_batches(store), folder) as run:
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                seed = int.from_bytes(name.encode()[-7:], "big") % 2**31
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        yield run
