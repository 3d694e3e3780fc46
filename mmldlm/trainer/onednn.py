"""Memory of the kernels that oneDNN compiles while a CPU trains in half precision.

oneDNN compiles a kernel for each combination of shapes of a half-precision matrix product and caches the most recently
used ones. Between steps, shapes differ by their number of rows: the tokens or predicted tokens of a micro-batch, padded
to a multiple of `ROW_MULTIPLE`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from mmldlm.batch import ROW_MULTIPLE
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.memory_tracker import CostTracker

KERNEL_MIB = 0.6  # measured with torch 2.13's oneDNN on a CPU with AMX units; 0.04 without instructions for bf16
CACHE_CAPACITY = 1024  # oneDNN's default number of kernels, unless its environment variable sets another


def has_bf16_instructions() -> bool:
    """Return whether this CPU has instructions for products of bfloat16 matrices."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def row_multiples(noised: Iterable[NoisedBatch]) -> set[int]:
    """Return the row counts of the micro-batches' tokens and predicted tokens, padded, in units of `ROW_MULTIPLE`."""
    return {-(-len(rows) // ROW_MULTIPLE) for batch in noised for rows in (batch.noised_tokens, batch.positions)}


def kernels_mib(costs: CostTracker, seen: set[int], expected: set[int]) -> float:
    """Return MiB of the kernels that a CPU with `has_bf16_instructions` caches.

    Args:
        costs: Tracker that has run steps with the row multiples `seen`.
        seen: Row multiples of these steps.
        expected: Row multiples of other steps of the run.
    """
    rows = {number * ROW_MULTIPLE for number in seen}
    products = costs.half_precision_products
    by_rows = sum(kind == "activations" and not rows.isdisjoint(sizes) for kind, sizes, _ in products)
    others = len(products) - by_rows  # products with one row per sample, and the optimizer's
    capacity = int(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", CACHE_CAPACITY))
    return min(capacity, others + by_rows * len(seen | expected) / len(seen)) * KERNEL_MIB
