"""Memory that a step takes on top of what is in memory before it, under engines that shard weights.

Their ranks gather weights in every forward pass, so none of them can try a micro-batch alone, and one that ran out of
memory within a step would leave the others waiting in a collective. The activations are those of the same network on
fake tensors, as in the dry run; the rest is a closed form by engine.
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


class MemoryPlan:
    """Memory of this rank: what a step may take and what it needs.

    Args:
        config: Config of the run, with its precision resolved.
        manifest: Manifest of the run's data.
        objective: Objective of the run.
        engine: Engine that has wrapped the model.
    """

    def __init__(self, config: RunConfig, manifest: Manifest, objective: Objective, engine: Engine):
        self.objective, self.engine = objective, engine
        self._weight_bytes = FLOAT32_BYTES if config.precision == "fp32" else 2  # of what is gathered
        self._model = build_fake_model(config, manifest)
        self._weights = sum(count_parameters(self._model).values())
        self._trained = sum(count_parameters(self._model, trainable_only=True).values())
        blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in self._model.blocks]
        self._block, self._outside = max(blocks), self._weights - sum(blocks)

    def usable_mib(self) -> float:
        """Return how much more memory this rank may take; without limit if the system does not say."""
        return USABLE_SHARE * free_memory_mib(self.engine.device, self.engine.launch.local_world_size)

    def needed_mib(self, noised: NoisedBatch, accumulating: bool) -> float:
        """Return what a step takes at its peak if `noised` is its largest micro-batch, of several if `accumulating`."""
        tracker = StepCostTracker(self._model, self.objective)
        with assume_device(self.engine.device.type):
            tracker.micro_batches([noised])
        self._model.zero_grad(set_to_none=True)
        activations = sum(tracker.costs.peak("activations", "batches").values())
        return (activations + (self._fsdp2(accumulating) if self.engine.name == FSDP2 else self._zero3())) / MIB

    def _fsdp2(self, accumulating: bool) -> int:
        """Return the bytes of gathered weights, gradients and moments that FSDP2 has yet to allocate."""
        engine: Any = self.engine
        reshards = engine.accelerator.state.fsdp_plugin.reshard_after_forward
        temporary = fsdp2_bytes(self._weights, self._block, self._outside, self._weight_bytes, reshards)
        # Whole gradients until the last micro-batch.
        whole = FLOAT32_BYTES * (self._trained if accumulating else self._outside)
        shard = self._trained * engine.launch.replicas // engine.world_size
        moments = 0 if engine.unwrapped_optimizer.state else 2
        return temporary + whole + FLOAT32_BYTES * (1 + moments) * shard

    def _zero3(self) -> int:
        """Return the bytes of gathered weights and unreduced gradients; all else is there since DeepSpeed's start."""
        engine: Any = self.engine
        deepspeed, secondary = engine.deepspeed, engine.launch.secondary_partition
        gathered = min(self._weights, deepspeed.zero_max_live_parameters() + deepspeed.zero_prefetch_bucket_size())
        if secondary > 1:
            gathered += self._weights // secondary
        bucket = min(self._trained, deepspeed.zero_reduce_bucket_size())
        return zero3_bytes(gathered, self._block, bucket, self._weight_bytes, engine.world_size)


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
