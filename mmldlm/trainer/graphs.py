"""`GraphReplays`: forward and backward pass of a micro-batch, recorded as a CUDA graph and started by one call.

A GPU that computes a step in 80 ms waits for a host that takes 150 ms to start its 2,700 kernels one by one. A graph has
the kernels, and the addresses of what they read and write: replaying it starts all of them. It is made for one bucket
of sizes, to which micro-batches are filled up (`mmldlm.diffusion.objective.fill_up`).
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

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

T = TypeVar("T")
MAX_GRAPHS = 64  # the least recently used one makes room
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 3e-2  # relative, of a replayed pass: some kernels add in no fixed order
Pass = tuple[Tensor, ...]  # loss and loss sums


def why_no_graphs(config: RunConfig, engine: str, device_type: str, backend: Backend) -> str:
    """Return why this run records no graphs; "" if it does. `compile.graphs: on` that cannot be is a `ConfigError`."""
    requested, missing = config.compile.graphs, ""
    if device_type != "cuda":
        missing = f"it needs CUDA, found {device_type}"
    elif not supports("compile.graphs: on", engine):
        missing = f"{engine} exchanges weights or gradients within the passes"
    elif backend not in JOINT_BACKENDS:
        missing = f"attention.backend {backend} reads lengths on the host"
    elif config.model.dropout and config.memory.activation_checkpointing != "none":
        missing = "dropout that is recomputed (memory.activation_checkpointing) needs the state of the host's generator"
    elif engine == DDP and config.distributed.ddp.comm_hook != "none":
        missing = f"distributed.ddp.comm_hook {config.distributed.ddp.comm_hook} is called by DDP, which sees no graph"
    if requested == "on" and missing:
        raise ConfigError(f"compile.graphs: found on, but {missing}; expected auto or off")
    if requested == "off":
        return "compile.graphs is off"
    if requested == "auto" and engine == DDP and not missing:
        return "compile.graphs: auto uses them in one process only, on under ddp as well"
    return missing


class Graph(Protocol):
    """A recorded function."""

    def replay(self) -> Pass:
        """Repeat what was recorded on the present contents of the same memory; return copies of the results."""


class GraphType(Protocol):
    """Records functions on a kind of device."""

    def run(self, function: Callable[[], T]) -> T:
        """Call a function as it will be recorded, so that what the first call sets up is not recorded."""

    def record(self, function: Callable[[], Pass]) -> Graph:
        """Record a function, without executing it."""


class CudaGraphs:
    """CUDA graphs, all of which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def run(self, function: Callable[[], T]) -> T:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def record(self, function: Callable[[], Pass]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # The default mode would refuse calls of other threads, which copy a checkpoint meanwhile.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            results = function()
        return _CudaGraph(graph, results)


class _CudaGraph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    results: Pass

    def replay(self) -> Pass:
        self.graph.replay()
        return tuple(result.clone() for result in self.results)  # the next replay overwrites them


class _Bucket:
    """Inputs of the micro-batches of a bucket, always in the same memory, and what was recorded with them."""

    def __init__(self, batch: NoisedBatch, divisors: Tensor, device: torch.device):
        assert batch.packed is not None
        packed = PackedTensors(torch.empty_like(batch.packed.buffer, device=device), batch.packed.places)
        self.batch = NoisedBatch.from_packed(packed, batch.layout.lengths, batch.layout.latent_tokens)
        self.buffer, self.divisors = packed.buffer, torch.empty_like(divisors, device=device)
        self.graph: Graph | None = None

    def load(self, batch: NoisedBatch, divisors: Tensor) -> None:
        assert batch.packed is not None
        self.buffer.copy_(batch.packed.buffer, non_blocking=True)
        self.divisors.copy_(divisors, non_blocking=True)


class GraphReplays:
    """Forward and backward passes of micro-batches, by graphs as far as they are recorded.

    The first micro-batch of a bucket is computed as without graphs, the second one records the bucket's graph, and it
    and all later ones replay it. The first graph is checked: its second replay, on other numbers than those of its
    recording, must have the results of an ordinary pass. If it does not, or if recording raises, all passes are ordinary
    from then on, and a warning says so.

    Args:
        compute: Adds to the gradients what a micro-batch on the device contributes, given the step's divisors
            (`Objective.divisors`), and returns detached results, the loss first. It may be called by a graph alone: it
            must not read on the host what it computes.
        gradients: Returns the gradients, which must keep their memory.
    """

    def __init__(
        self,
        compute: Callable[[NoisedBatch, Tensor], Pass],
        gradients: Callable[[], list[Tensor]],
        device: torch.device,
        graph_type: GraphType | None = None,
    ):
        self.compute, self.gradients, self.device = compute, gradients, device
        self.graph_type = graph_type or CudaGraphs()
        self.buckets: OrderedDict[Any, _Bucket] = OrderedDict()
        self.is_on, self._is_checked = True, False

    def __call__(self, batch: NoisedBatch, divisors: Tensor) -> Pass:
        """Add the gradients of a micro-batch, which is on the host; return its results."""
        if not self.is_on:
            return self.compute(batch.to(self.device), divisors.to(self.device))
        assert batch.packed is not None, "a micro-batch that is not filled up"
        key = tuple(batch.packed.places.items())
        is_new = key not in self.buckets
        if is_new:
            self.buckets[key] = _Bucket(batch, divisors, self.device)
        if len(self.buckets) > MAX_GRAPHS:
            self.buckets.popitem(last=False)
        self.buckets.move_to_end(key)
        bucket = self.buckets[key]
        bucket.load(batch, divisors)

        def compute() -> Pass:
            return self.compute(bucket.batch, bucket.divisors)

        if is_new:
            return self.graph_type.run(compute)
        if bucket.graph is not None:
            return bucket.graph.replay() if self._is_checked else self._checked(bucket.graph, compute)
        try:
            bucket.graph = self.graph_type.record(compute)
        except Exception as error:  # of many types: what a kernel does may be forbidden while it is recorded
            self._turn_off(f"recording failed: {str(error).strip().partition(chr(10))[0] or type(error).__name__}")
            return self.graph_type.run(compute)
        return bucket.graph.replay()

    def _checked(self, graph: Graph, compute: Callable[[], Pass]) -> Pass:
        """Replay a graph and compute the same without it; return the latter's results."""
        before = [gradient.clone() for gradient in self.gradients()]
        replayed, gradients = graph.replay(), self.gradients()
        by_graph = torch._foreach_sub(gradients, before)
        torch._foreach_copy_(gradients, before)
        results = self.graph_type.run(compute)
        torch._foreach_sub_(by_graph, torch._foreach_sub(gradients, before))
        error = _norm(by_graph) / _norm(torch._foreach_sub(gradients, before))
        loss_error = abs(1 - float(replayed[0] / results[0]))
        self._is_checked = math.isfinite(results[0])  # in a step that is skipped nothing can be compared
        if self._is_checked and not (error <= GRADIENT_TOLERANCE and loss_error <= LOSS_TOLERANCE):
            what = f"its loss differs by {loss_error:.1%}, its gradients by {error:.1%}"
            self._turn_off(f"a replayed pass is not the same as an ordinary one: {what}")
        return results

    def _turn_off(self, reason: str) -> None:
        log.warning("compile.graphs is off from here on, and steps are slower: %s", reason)
        self.is_on = False
        self.buckets.clear()


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
