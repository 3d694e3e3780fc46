"""Batch sizes that do not change with the step."""

from __future__ import annotations

from collections.abc import Callable

from mmldlm.batch import BatchSize


def constant_batch_size(global_batch_size: int, micro_batch_size: int) -> Callable[[int], BatchSize]:
    """Return a batch schedule with the same sizes at every step."""
    return lambda _step: BatchSize(global_batch_size, micro_batch_size)
