"""Memory of a rank under each engine: a closed form on what a step takes in one process; docs/engines.md has the table.

It knows weights, gradients, optimizer state, activations, gathered weights and buckets. It does not know workspaces of
kernels, NCCL's buffers and fragmentation, for which `USABLE_SHARE` leaves room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from mmldlm.distributed.capabilities import OFFLOAD_ENGINES, WEIGHT_SHARDING_ENGINES, ZERO_ENGINES
from mmldlm.distributed.launch import DDP, FSDP2, SINGLE
from mmldlm.trainer.memory_tracker import Kind, StepTracker

MIB = 2**20
USABLE_SHARE = 0.9  # of a device's memory, that an estimate may fill
FLOAT32 = 4  # bytes
_WORKING: tuple[Kind, ...] = ("activations", "batches", "update")


@dataclass(frozen=True)
class StepMemory:
    """What a step takes in one process that has all of the state, and the sizes by which engines divide it."""

    parameters: int
    trained_shapes: Sequence[tuple[int, ...]]
    largest_block: int = 0  # parameters, as is the next
    outside_blocks: int = 0
    peak: Mapping[Kind, int] = field(default_factory=dict)  # bytes by kind, at the peak of their sum
    working: int = 0  # bytes of activations, batches and temporaries of the update, at the peak of their sum
    accumulates: bool = False  # a step has several micro-batches
    one_moment: int = 0  # trained parameters with one moment instead of two (Muon's)
    ema: bool = False

    @classmethod
    def of(cls, tracker: StepTracker, accumulates: bool, one_moment: int = 0, ema: bool = False) -> StepMemory:
        """Return the memory of the steps that `tracker` has seen, and of an EMA of the trained weights."""
        model, peak = tracker.model, tracker.costs.peak()
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
        if ema:  # whose update needs no more
            peak["ema"] = FLOAT32 * sum(map(prod, shapes))
        working = sum(tracker.costs.peak(*_WORKING).values())
        return cls(
            parameters, shapes, max(blocks), parameters - sum(blocks), peak, working, accumulates, one_moment, ema
        )

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(map(prod, self.trained_shapes))


@dataclass(frozen=True)
class Sharding:
    """How an engine divides the state among ranks, and its buffers, by default those of the shipped files."""

    engine: str
    precision: str
    world_size: int
    replicas: int = 1  # groups of ranks under fsdp2, each of which holds all shards
    reshards: bool = True  # fsdp2 frees gathered weights after forward
    bucket: int = 100_000_000  # gradients that ZeRO reduces together
    max_gathered: int = 550_000_000  # parameters that zero3 keeps gathered and fetches ahead
    secondary_partition: int = 1  # ranks that share zero3's second copy of the weights; 1: there is none

    @property
    def shards(self) -> int:
        return 1 if self.engine in (SINGLE, DDP) else self.world_size // self.replicas

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is gathered, and of ZeRO's weights beside their masters."""
        return FLOAT32 if self.precision == "fp32" else 2


class RankMemory(NamedTuple):
    """MiB of a rank."""

    state: float  # weights, EMA, gradients, master weights and moments on the device
    peak: float  # all that is on the device at the same time
    host: float  # state on the host


def rank_memory(step: StepMemory, sharding: Sharding) -> RankMemory:
    """Return the memory of a rank of an engine for the step."""
    device, host = _state(step, sharding)
    return RankMemory(device / MIB, _peak(step, sharding, device) / MIB, host / MIB)


def _state(step: StepMemory, sharding: Sharding) -> tuple[float, float]:
    """Return the bytes of weights, EMA, gradients, master weights and moments on (the device, the host)."""
    engine, low, share = sharding.engine, sharding.weight_bytes, 1 / sharding.shards
    # Bytes for each trained parameter. 4: gradients in float32; 12: ZeRO's masters and two moments; 16: both, or the
    # weights, gradients and moments of the other engines.
    device, host = {
        SINGLE: (16.0, 0.0),
        DDP: (16.0, 0.0),
        FSDP2: (16 * share, 0.0),
        "zero1": (low + 4 + 12 * share, 0.0),
        "zero2": (low + 16 * share, 0.0),
        "zero3": ((low + 16) * share, 0.0),
        "zero2_offload": (low + 4 * share, 12 * share),
        "zero3_offload": (0.0, (low + 16) * share),
    }[engine]
    ema = FLOAT32 * share * step.ema  # divided as the master weights are
    device, host = (device, host + ema) if engine in OFFLOAD_ENGINES else (device + ema, host)
    # FSDP2 cuts each parameter by rows, and all ranks hold as many as the one with the most. What ZeRO pads, flattened
    # parameters, is negligible.
    shards = sharding.shards if engine == FSDP2 else 1
    trained = sum(-(-rows // shards) * shards * prod(columns) for rows, *columns in step.trained_shapes)
    weights_share = share if engine in WEIGHT_SHARDING_ENGINES else 1.0
    frozen = (step.parameters - step.trained) * (low if engine in ZERO_ENGINES else FLOAT32) * weights_share
    frozen_on_host = frozen if engine == "zero3_offload" else 0.0
    missing_moments = step.one_moment * FLOAT32 * weights_share  # under no engine that offloads
    return trained * device - missing_moments + frozen - frozen_on_host, trained * host + frozen_on_host


def _peak(step: StepMemory, sharding: Sharding, state: float) -> float:
    """Return the bytes that are on the device at the same time, `state` of them for the state."""
    peak, engine, share, low = step.peak, sharding.engine, 1 / sharding.shards, sharding.weight_bytes
    if engine == SINGLE:
        return sum(peak.values())
    gradients = FLOAT32 * step.trained
    if engine == DDP:  # buckets with all gradients, and those of earlier micro-batches beside them
        return state + step.working + gradients * step.accumulates
    # Memory is largest when activations are, or at the end of backward. Beside the state there are then:
    at_activations, at_end = 0.0, 0.0
    bucket = FLOAT32 * min(step.trained, sharding.bucket)
    present = peak.get("gradients", 0)  # of a process that has all
    missing = share * (gradients - present)  # gradients of this rank that activations meet before they are there
    if engine == FSDP2:
        # Of the blocks: the one that computes, the next one, and the buffer of a gather that is copied out of.
        gathered = step.outside_blocks + 3 * step.largest_block if sharding.reshards else step.parameters
        at_activations = low * gathered
        # Gradients of a block as backward computes them, and in float32 to be reduced.
        at_end = at_activations + (low + FLOAT32) * 2 * step.largest_block
        if step.accumulates:  # those of earlier micro-batches are whole
            missing = share * gradients - present
    elif engine.startswith("zero3"):
        gathered = min(step.parameters, sharding.max_gathered) if sharding.world_size > 1 else 0
        if sharding.secondary_partition > 1:
            gathered += step.parameters // sharding.secondary_partition
        # A block's gradients, and copies of a bucket in the type and in the order in which it is exchanged.
        at_activations = low * (gathered + step.largest_block) + 2 * bucket
        at_end = at_activations + bucket * share  # what reduce-scatter returns
        # As gradients appear, the gathered weights of their blocks are released.
        on_device = engine == "zero3" and not step.accumulates
        missing = share * gradients * on_device
    else:
        at_end = bucket
        if engine == "zero1":  # keeps whole gradients
            missing = gradients - present
    return state + max(at_end, at_activations + sum(peak.get(kind, 0) for kind in _WORKING) - missing)
