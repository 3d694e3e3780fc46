"""`GraphReplays`: records forward and backward pass of a micro-batch as a CUDA graph, and starts it by one call.

For example, a GPU that computes a step in 80 ms must wait for a host that takes 150 ms to start its 2,700 kernels one
by one. A graph contains the kernels and the addresses that they read and write, and a replay starts them all at once.
Each graph is for one bucket of sizes. `mmldlm.diffusion.corruption.StaticSizes` fills micro-batches up to bucket sizes.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmldlm.config import RunConfig
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.distributed.capabilities import supports
from mmldlm.distributed.launch import DDP
from mmldlm.errors import ConfigError
from mmldlm.model.attention import JOINT_BACKENDS, Backend
from mmldlm.utils.packed_tensors import PackedTensors

log = logging.getLogger(__name__)

MAX_GRAPHS = 64  # beyond this, the least recently used graph is dropped
# Relative errors that a replayed pass may have, because some kernels add in no fixed order.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 3e-2
Results = tuple[Tensor, ...]  # loss and loss sums


def why_no_graphs(config: RunConfig, engine: str, device_type: str, backend: Backend) -> str:
    """Return why this run records no graphs, or "" if it does. `ConfigError` if it must record them but cannot."""
    requested, hook, missing = config.compile.graphs, config.distributed.ddp.comm_hook, ""
    if device_type != "cuda":
        missing = f"graphs need CUDA, found {device_type}"
    elif not supports("compile.graphs: true", engine):
        missing = f"{engine} exchanges weights or gradients within the passes"
    elif backend not in JOINT_BACKENDS:
        missing = f"attention.backend {backend} reads lengths on the host"
    elif config.model.dropout and config.memory.activation_checkpointing != "none":
        missing = "recomputed dropout (memory.activation_checkpointing) reads the state of the random numbers"
    elif engine == DDP and hook != "none":
        missing = f"distributed.ddp.comm_hook {hook} is called by DDP, which takes no part in a graph"
    if requested is True and missing:
        raise ConfigError(f"compile.graphs: found true, but {missing}; expected auto or false")
    if requested == "auto" and engine == DDP and not missing:
        return "compile.graphs: auto uses them in one process alone, true under ddp as well"
    return missing if requested else "compile.graphs is false"


class CudaGraphs:
    """Records the work of functions on the current CUDA device. All graphs share one memory pool."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def run(self, function: Callable[[], Results]) -> Results:
        """Call a function on the recording stream, so that its first call sets everything up there."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            results = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return results

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """Record a function without executing it. Return a function that replays it on the present memory contents."""
        graph = torch.cuda.CUDAGraph()
        # The default mode would refuse CUDA calls of other threads, and they may be copying a checkpoint.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            results = function()

        def replay() -> Results:
            graph.replay()
            return tuple(result.clone() for result in results)  # clone, because the next replay overwrites them

        return replay


@dataclass
class _Bucket:
    """The input memory of a bucket, and the function that replays the passes recorded with it."""

    batch: NoisedBatch
    divisors: Tensor
    replay: Callable[[], Results] | None = None

    @classmethod
    def like(cls, batch: NoisedBatch, divisors: Tensor, device: torch.device) -> _Bucket:
        packed = PackedTensors(torch.empty_like(batch.packed.buffer, device=device), batch.packed.places)
        inputs = NoisedBatch.from_packed(packed, batch.layout, batch.counts, batch.sample_ids)
        return cls(inputs, torch.empty_like(divisors, device=device))

    def load(self, batch: NoisedBatch, divisors: Tensor) -> None:
        self.batch.packed.buffer.copy_(batch.packed.buffer, non_blocking=True)
        self.divisors.copy_(divisors, non_blocking=True)


class GraphReplays:
    """Runs forward and backward passes of micro-batches, and replays recorded ones.

    The first micro-batch of a bucket runs an ordinary pass. The second one records the bucket's graph and replays it,
    as do all later ones. The first graph is checked: its second replay works on numbers that did not exist when it was
    recorded, and must give the results of an ordinary pass. If the results differ, or if recording raises, all further
    passes are ordinary, and a warning says so.

    Args:
        compute: Adds the gradients of a micro-batch on the device to the existing ones, given `Objective.divisors`.
            Returns detached results, the loss first. Since graphs record it, it must not read its results on the host.
        gradients: Returns the gradients, which must stay at the same place in memory.
        graphs: Records functions on the device.
    """

    def __init__(
        self,
        compute: Callable[[NoisedBatch, Tensor], Results],
        gradients: Callable[[], list[Tensor]],
        device: torch.device,
        graphs: Any = None,
    ):
        self.compute, self.gradients, self.device = compute, gradients, device
        self.graphs = graphs or CudaGraphs()
        self.buckets: OrderedDict[Any, _Bucket] = OrderedDict()
        self.is_on, self.is_checked = True, False

    def __call__(self, batch: NoisedBatch, divisors: Tensor) -> Results:
        """Add the gradients of a micro-batch, which is on the host, to the existing ones. Return its results."""
        if not self.is_on:
            return self.compute(batch.to(self.device), divisors.to(self.device))
        key = tuple(batch.packed.places.items())
        is_first = key not in self.buckets
        if is_first:
            self.buckets[key] = _Bucket.like(batch, divisors, self.device)
        self.buckets.move_to_end(key)
        if len(self.buckets) > MAX_GRAPHS:
            self.buckets.popitem(last=False)
        bucket = self.buckets[key]
        bucket.load(batch, divisors)

        def compute() -> Results:
            return self.compute(bucket.batch, bucket.divisors)

        if is_first:
            return self.graphs.run(compute)
        if bucket.replay is not None:
            return bucket.replay() if self.is_checked else self._check(bucket.replay, compute)
        try:
            bucket.replay = self.graphs.record(compute)
        except Exception as error:  # of many types: some kernels must not be recorded
            self._turn_off(str(error).strip().partition("\n")[0] or type(error).__name__)
            return self.graphs.run(compute)
        return bucket.replay()

    def _check(self, replay: Callable[[], Results], compute: Callable[[], Results]) -> Results:
        """Replay a graph and compare it with an ordinary pass. Return the results of the ordinary pass."""
        gradients = self.gradients()
        before = [gradient.clone() for gradient in gradients]
        replayed = replay()
        by_graph = torch._foreach_sub(gradients, before)
        torch._foreach_copy_(gradients, before)
        results = self.graphs.run(compute)
        expected = torch._foreach_sub(gradients, before)
        gradient_error = _norm(torch._foreach_sub(by_graph, expected)) / _norm(expected)
        loss_error = abs(1 - float(replayed[0] / results[0]))
        self.is_checked = math.isfinite(results[0])  # a skipped step has nothing to compare
        if self.is_checked and not (gradient_error <= GRADIENT_TOLERANCE and loss_error <= LOSS_TOLERANCE):
            self._turn_off(
                f"a replayed pass differs from an ordinary one, its loss by {loss_error:.1%}, its gradients by "
                f"{gradient_error:.1%}"
            )
        return results

    def _turn_off(self, reason: str) -> None:
        log.warning("CUDA graphs are off from here on, so steps are slower: %s", reason)
        self.is_on = False
        self.buckets.clear()


def _norm(tensors: tuple[Tensor, ...] | list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
