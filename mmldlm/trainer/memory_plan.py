"""Estimate of the memory that a step takes under an engine that shards weights.

There no rank can try a micro-batch alone, for its forward pass gathers weights from all ranks. Activations are those
of the same network on fake tensors, as in the dry run; the rest is a closed form by engine.
"""

from __future__ import annotations

from typing import Any

from mmldlm.config import RunConfig
from mmldlm.data.manifest import Manifest
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.launcher import FSDP2
from mmldlm.model.mmdit import count_parameters
from mmldlm.model.ops import assume_device
from mmldlm.run.factory import build_fake_model
from mmldlm.telemetry.resources import free_memory_mib
from mmldlm.trainer.memory_tracker import StepCostTracker

MIB = 2**20
# The rest is for what the estimate does not know: workspaces of kernels, NCCL's buffers, fragmentation.
USABLE_SHARE = 0.9
FLOAT32_BYTES = 4


def usable_mib(engine: Engine) -> float:
    """Return how much more memory this rank may take; without limit if the system does not say."""
    return USABLE_SHARE * free_memory_mib(engine.device, engine.launch.local_world_size)


def needed_mib(
    config: RunConfig, manifest: Manifest, objective: Objective, engine: Any, noised: NoisedBatch, accumulates: bool
) -> float:
    """Return what a step takes at its peak if `noised` is its largest micro-batch, of several if it `accumulates`."""
    model = build_fake_model(config, manifest)
    tracker = StepCostTracker(model, objective)
    with assume_device(engine.device.type):
        tracker.micro_batches([noised])
    activations = sum(tracker.costs.peak("activations", "batches").values())
    weight_bytes = FLOAT32_BYTES if config.precision == "fp32" else 2  # of what is gathered
    weights = sum(count_parameters(model).values())
    trained = sum(count_parameters(model, trainable_only=True).values())
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    block, outside = max(blocks), weights - sum(blocks)
    if engine.name == FSDP2:  # has yet to allocate gathered weights, gradients and moments
        reshards = engine.accelerator.state.fsdp_plugin.reshard_after_forward
        # Whole gradients until the last micro-batch.
        whole = FLOAT32_BYTES * (trained if accumulates else outside)
        shard = trained * engine.launch.replicas // engine.world_size
        moments = 0 if engine.unwrapped_optimizer.state else 2
        rest = fsdp2_bytes(weights, block, outside, weight_bytes, reshards) + whole
        return (activations + rest + FLOAT32_BYTES * (1 + moments) * shard) / MIB
    # Under ZeRO-3 gathered weights and unreduced gradients; all else is there since DeepSpeed's start.
    deepspeed, secondary = engine.deepspeed, engine.launch.secondary_partition
    gathered = min(weights, deepspeed.zero_max_live_parameters() + deepspeed.zero_prefetch_bucket_size())
    if secondary > 1:
        gathered += weights // secondary
    bucket = min(trained, deepspeed.zero_reduce_bucket_size())
    return (activations + zero3_bytes(gathered, block, bucket, weight_bytes, engine.world_size)) / MIB


def fsdp2_bytes(weights: int, block: int, outside: int, weight_bytes: int, reshards: bool = True) -> int:
    """Return the bytes of FSDP2's gathered weights and of a block's gradients; the sizes are numbers of parameters."""
    # Of the blocks: the one that computes, the next one, and the buffer of a gather that is copied out of.
    gathered = outside + 3 * block if reshards else weights
    # Gradients as backward computes them, and in float32 to be reduced.
    return weight_bytes * gathered + (weight_bytes + FLOAT32_BYTES) * 2 * block


def zero3_bytes(gathered: int, block: int, bucket: int, weight_bytes: int, world_size: int) -> int:
    """Return the bytes of ZeRO-3's gathered weights and unreduced gradients; the sizes are numbers of parameters."""
    if world_size == 1:
        gathered = 0  # the process has all weights
    # A block's gradients, and copies of a bucket in the type and in the order in which it is exchanged.
    return weight_bytes * (gathered + block) + 2 * FLOAT32_BYTES * bucket
