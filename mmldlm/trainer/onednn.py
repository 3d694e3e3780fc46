"""Memory of the kernels that a CPU makes while it trains.

For a product in half precision oneDNN makes a kernel for its shapes, and keeps those used last. In training rows are
tokens or predicted tokens of a micro-batch, filled up to multiples of `ROWS`, and their numbers are what shapes differ
by from step to step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from mmldlm.batch import ROWS
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.memory_tracker import Costs

KERNEL_MIB = 0.6  # measured with torch 2.13's oneDNN on a CPU with AMX units; 0.04 without instructions for bf16
CAPACITY = 1024  # oneDNN's own, unless its environment variable says otherwise


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 matrices."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def rows_of(noised: Iterable[NoisedBatch]) -> set[int]:
    """Multiples of `ROWS` that the micro-batches' tokens and predicted tokens are filled up to."""
    return {-(-len(rows) // ROWS) for batch in noised for rows in (batch.noised_tokens, batch.positions)}


def kernels_mib(costs: Costs, seen: set[int], expected: set[int]) -> float:
    """What a CPU that `multiplies_bf16` keeps: `costs` has met the rows `seen`, and the run will have `expected`."""
    rows = {number * ROWS for number in seen}
    by_rows = sum(kind == "activations" and not rows.isdisjoint(sizes) for kind, sizes, _ in costs.products_in_half)
    others = len(costs.products_in_half) - by_rows  # of one row a sample; of the optimizer
    capacity = int(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", CAPACITY))
    return min(capacity, others + by_rows * len(seen | expected) / len(seen)) * KERNEL_MIB
