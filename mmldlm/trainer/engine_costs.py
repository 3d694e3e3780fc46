"""Closed form of what an engine holds and exchanges on one rank, by number of ranks; docs/engines.md has the tables.

`python -m benchmarks scale` compares it with the real engines on a simulated process group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mmldlm.distributed.capabilities import ZERO_ENGINES
from mmldlm.distributed.launcher import DDP, FSDP2

BYTES_PER_GRADIENT = 4  # exchanged in float32, under ZeRO by `communication_data_type` of the shipped files


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a run share the state of its model."""

    engine: str
    precision: str
    world_size: int
    replicas: int = 1  # groups of ranks under fsdp2, each of which holds all shards

    @property
    def shards(self) -> int:
        return self.world_size // self.replicas

    @property
    def share(self) -> float:
        """Part of what is sharded that a rank holds."""
        return 1 / self.shards

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is gathered, and of DeepSpeed's weights without its masters."""
        return 4 if self.precision == "fp32" else 2


class StateBytes(NamedTuple):
    """Bytes per trained parameter."""

    device: float
    host: float


def state_bytes(sharding: Sharding) -> StateBytes:
    """Return the bytes of weights, gradients, master weights and moments per trained parameter.

    Excludes communication buckets, and the blocks that FSDP2 and ZeRO-3 gather temporarily.
    """
    low, share = sharding.weight_bytes, sharding.share
    # 4: accumulated gradients in float32; 12: DeepSpeed's masters and two moments; 16: both, or with other weights.
    return {
        DDP: StateBytes(16.0, 0.0),
        FSDP2: StateBytes(16 * share, 0.0),
        "zero1": StateBytes(low + 4 + 12 * share, 0.0),
        "zero2": StateBytes(low + 16 * share, 0.0),
        "zero3": StateBytes((low + 16) * share, 0.0),
        "zero2_offload": StateBytes(low + 4 * share, 12 * share),
        "zero3_offload": StateBytes(0.0, (low + 16) * share),
    }[sharding.engine]


def padded_parameters(sharding: Sharding, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the elements of parameters of these shapes that the shards of all ranks have together.

    FSDP2 cuts each parameter by rows, and all ranks hold and exchange as many as the one with the most. ZeRO cuts what
    it has flattened: its padding is negligible.
    """
    shards = sharding.shards if sharding.engine == FSDP2 else 1
    return sum(-(-rows // shards) * shards * prod(columns) for rows, *columns in shapes)


def step_traffic(
    sharding: Sharding, parameters: int, unsharded_once: int = 0, accumulation: int = 1
) -> dict[tuple[str, int], float]:
    """Return the payload of a rank's collectives in an optimizer step, in bytes.

    Excludes exchanges that do not grow with the model: counts of the step, norms and flags.

    Args:
        unsharded_once: Parameters that a micro-batch gathers once instead of twice, in forward and in backward: under
            fsdp2 those outside of the blocks, under zero3 those that DeepSpeed keeps from forward to backward.

    Returns:
        Bytes of the whole tensors by (kind of collective, ranks that take part).
    """
    world = sharding.world_size
    gradients = BYTES_PER_GRADIENT * parameters
    gathered = sharding.weight_bytes * accumulation * (2 * parameters - unsharded_once)
    if sharding.engine == DDP:
        return {("all_reduce", world): gradients}
    if sharding.engine == FSDP2:
        traffic = {("all_gather", sharding.shards): gathered, ("reduce_scatter", sharding.shards): gradients}
        # Replicas exchange the shards that reduce-scatter has left to each rank.
        return traffic | (
            {("all_reduce", sharding.replicas): gradients / sharding.shards} if sharding.replicas > 1 else {}
        )
    assert sharding.engine in ZERO_ENGINES
    if sharding.engine.startswith("zero3"):
        return {("all_gather", world): gathered, ("reduce_scatter", world): gradients * accumulation}
    # ZeRO-1 and 2 all-reduce whole buckets, though a rank needs only its part of them. ZeRO-1 keeps whole gradients,
    # and reduces them with the last micro-batch.
    reductions = 1 if sharding.engine == "zero1" else accumulation
    return {("all_reduce", world): gradients * reductions, ("all_gather", world): sharding.weight_bytes * parameters}
