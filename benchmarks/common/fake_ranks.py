"""One rank of a run of any size in a single process: real engines on fake tensors and PyTorch's "fake" process group.

That group has a rank and a world size but exchanges nothing, and fake tensors have shapes but no memory. So values are
meaningless, and numbers and sizes of collectives and tensors are exact, for networks of any size.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from mmldlm.batch import PackedLayout
from mmldlm.distributed.capabilities import ZERO_ENGINES
from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.deepspeed_config import StepPlan
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.init import build_engine, deepspeed_config
from mmldlm.distributed.launcher import DDP, read_launcher_env
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig, Precision
from mmldlm.optim.config import OptimConfig
from mmldlm.trainer.engine_costs import Sharding

KINDS = {  # operators of torch.distributed by kind of collective
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
}
UNCOUNTED = ("wait_tensor", "barrier")
SMALL_BYTES = 4096  # of an all-reduce or broadcast: counts, norms and flags, not parameters
DATA = DataShape(vocab_size=30_522, mask_id=1, pad_id=0, max_length=512, latent_tokens=1, latent_channels=64)
SAMPLES, LENGTH = 1, 64  # of a micro-batch, on which neither traffic nor state depends
STEPS = 2  # DDP rearranges its buckets after the first step, and DeepSpeed its gathers


@dataclass(frozen=True)
class Network:
    """Sizes of a network with heads of 64 channels."""

    depth: int
    width: int
    data: DataShape = DATA

    def build(self, precision: Precision) -> MMDiT:
        config = ModelConfig(depth=self.depth, width=self.width, num_heads=max(1, self.width // 64))
        return MMDiT(config, self.data, "sdpa", precision=precision).train()

    @cache  # noqa: B019
    def shapes(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shapes of the parameters in the blocks, and of all others."""
        with torch.device("meta"):
            parameters = dict(self.build("fp32").named_parameters())
        blocks, others = [], []
        for name, parameter in parameters.items():
            (blocks if ".blocks." in f".{name}" else others).append(tuple(parameter.shape))
        return blocks, others


@dataclass
class Collectives:
    """Number and bytes of the whole tensors of collectives, by (kind, ranks that take part)."""

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    payload: Counter[tuple[str, int]] = field(default_factory=Counter)
    small: Counter[str] = field(default_factory=Counter)  # calls up to `SMALL_BYTES`, by kind


@dataclass(frozen=True)
class Step:
    """One rank's optimizer step in the steady state."""

    collectives: Collectives
    state_bytes: int  # weights, gradients, masters and moments, after the last backward pass of the step


class _Simulation(FakeTensorMode):
    """Fake tensors that answer what the host asks for, and counted collectives, also of DDP's reducer in C++."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.counts = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with the tensors and collectives that it consists of
        if func is torch.ops.aten._local_scalar_dense.default and _is_unknown(args[0]):
            return 0  # a norm, or whether it is invalid
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, name: str, args: Any) -> None:
        if name not in KINDS:
            assert name in UNCOUNTED, f"torch.distributed called {name}, which is not counted"
            return
        # Input and output differ where a collective shards; the larger is the whole tensor.
        sizes = [sum(tensor.nbytes for tensor in tree_leaves(arg) if isinstance(tensor, Tensor)) for arg in args]
        size, kind = max(sizes), KINDS[name]
        if size <= SMALL_BYTES and kind in ("all_reduce", "broadcast"):
            self.counts.small[kind] += 1
            return
        key = kind, _group_size(args)
        self.counts.calls[key] += 1
        self.counts.payload[key] += size


def _is_unknown(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def _group_size(args: Any) -> int:
    """Return the size of the process group among an operator's arguments: an object, or a name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(name).size()


@contextmanager
def _patched_libraries() -> Iterator[None]:
    """Replace what fake tensors cannot do, and what takes minutes with them."""
    from deepspeed.runtime.zero import utils as zero_utils

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # PyTorch swaps fake tensors with their conversions, which fails where there are weak references.
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module.named_parameters(recurse=False):
            converted = function(parameter.data)
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(converted, parameter.requires_grad))
            else:
                parameter.data = converted
        for buffer in module.buffers(recurse=False):
            buffer.data = function(buffer.data)
        return module

    def chunks_of_rank_0(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
        # FSDP2 cuts each tensor into the chunks of all ranks and takes its own.
        return [tensor.narrow(dim, 0, -(-tensor.shape[dim] // num_chunks))] * num_chunks

    with (
        patch.object(nn.Module, "_apply", convert),
        patch.object(fsdp_param, "_chunk_with_empty", chunks_of_rank_0),
        # ZeRO-3 compares the order of its modules with rank 0's by their numbers.
        patch.object(zero_utils, "assert_lst_len_same_as_other_ranks", lambda numbers: None),
        patch.object(zero_utils, "get_lst_from_rank0", lambda numbers: numbers),
    ):
        yield


@_patched_libraries()
def simulate(network: Network, sharding: Sharding, accumulation: int = 1) -> Step:
    """Run steps of rank 0 with the trainer's own engine, and return the last.

    Sets the process group and variables of this process, so each call needs a process of its own.
    """
    simulation = _Simulation()
    engine = _engine(network, sharding, accumulation)
    with simulation:
        with torch.device("meta"):
            model = network.build(sharding.precision)
        optimizer = build_optimizer(model, OptimConfig())
        weights = {name: torch.empty(parameter.shape) for name, parameter in model.named_parameters()}
    # Device meshes and DDP's reducer read numbers that they have made, so these are real; fake weights stay fake.
    with simulation if sharding.engine in ZERO_ENGINES else nullcontext():
        engine.prepare(model, optimizer, weights)
    if sharding.engine == DDP:
        # DDP checks the annotation, which this module's are texts.
        _all_reduce.__annotations__ = {"bucket": dist.GradBucket}
        engine.model.register_comm_hook(None, _all_reduce)
    with simulation:
        engine.warm_up(partial(_loss, data=network.data))
    for step in range(STEPS):
        if sharding.engine == DDP:
            engine.model.reducer._rebuild_buckets()  # as the forward pass would
        simulation.counts = Collectives()
        with simulation:
            _accumulate(engine, network.data, accumulation)
            if step == STEPS - 1:
                held = _bytes(_state(engine))
            engine.update(1e-4, 1.0)
    return Step(simulation.counts, held)


def _engine(network: Network, sharding: Sharding, accumulation: int) -> Engine:
    """Return the engine that torchrun with `sharding.world_size` processes and our config files would start."""
    world = sharding.world_size
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # which nothing opens
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    launch = read_launcher_env(os.environ, None, f"accelerate_configs/{sharding.engine}.yaml")
    launch = replace(launch, replicas=sharding.replicas)
    plan = StepPlan(SAMPLES, accumulation, SAMPLES * accumulation * world, 1.0, sharding.precision, network.width)
    engine = build_engine(DistributedConfig(), launch, plan, deepspeed_config(launch, plan))
    # The other ranks have nothing to tell, and fake tensors tell "cpu:0" from the "cpu" of others.
    engine.gather = lambda value, what="": [value]  # type: ignore[method-assign]
    engine.device = torch.device("cpu")
    return engine


def _all_reduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own all-reduce: its default takes the tensor from the work's future, and a fake group's is empty."""
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _accumulate(engine: Engine, data: DataShape, accumulation: int) -> None:
    """Run forward and backward of a step's micro-batches."""
    for _ in engine.accumulate(range(accumulation)):
        engine.backward(_loss(engine.forward, data))


def _loss(network: Callable[..., Any], data: DataShape) -> Tensor:
    """Return a number that depends on every parameter."""
    layout = PackedLayout((LENGTH,) * SAMPLES, data.latent_tokens)
    tokens = torch.randint(2, data.vocab_size, (SAMPLES * LENGTH,))
    latents = torch.randn(SAMPLES, data.latent_tokens, data.latent_channels)
    times, positions = torch.rand(SAMPLES), torch.arange(0, SAMPLES * LENGTH, 2)
    out = network(tokens, latents, times, times, layout, positions, tokens[positions])
    return out.text.sum() + out.latent.square().sum() + out.length_logits.sum()


def _state(engine: Engine) -> Iterator[Any]:
    """Yield what this rank holds of weights, gradients, masters and moments."""
    for shard in engine.local_shards(gradients=True):
        yield from (shard.weight, shard.gradient, shard.network_weight, *shard.state.values())
    yield from (weight for _, _, weight in engine.network_weights())


def _bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors' memory, each memory once."""
    storages = {}
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
