"""One rank of a run of any size in a single process: real engines on PyTorch's "fake" process group.

That group has a rank and a world size but exchanges nothing, so values are meaningless, and numbers and sizes of the
collectives are exact. FSDP2 runs on fake tensors, which have shapes but no memory. DDP's reducer and DeepSpeed read
values on the host, which fake tensors do not have, so they run on real ones, with models that are small.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmldlm.batch import PackedLayout
from mmldlm.distributed.capabilities import ZERO_ENGINES
from mmldlm.distributed.config import DistributedConfig
from mmldlm.distributed.deepspeed_config import StepPlan, resolve_deepspeed_config
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.init import FSDP_BLOCK_CLASS, _build_accelerator, _engine_class
from mmldlm.distributed.launcher import DDP, FSDP2, read_launcher_env
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
SMALL_BYTES = 4096  # of an all-reduce or broadcast: counts, norms and flags, not parameters
DATA = DataShape(vocab_size=30_522, mask_id=1, pad_id=0, max_length=512, latent_tokens=1, latent_channels=64)
SAMPLES, LENGTH = 2, 64  # of a micro-batch, on which neither traffic nor state depends


@dataclass(frozen=True)
class Network:
    """Sizes of a network with heads of 64 channels."""

    depth: int
    width: int
    data: DataShape = DATA

    def build(self, precision: Precision) -> MMDiT:
        config = ModelConfig(depth=self.depth, width=self.width, num_heads=max(1, self.width // 64))
        return MMDiT(config, self.data, "sdpa", precision=precision).train()


@dataclass
class Collectives:
    """Number and bytes of the whole tensors of collectives, by (kind, ranks that take part)."""

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    payload: Counter[tuple[str, int]] = field(default_factory=Counter)
    small: Counter[str] = field(default_factory=Counter)  # calls up to `SMALL_BYTES`, by kind


@dataclass(frozen=True)
class Step:
    """One rank's optimizer step in the steady state."""

    parameters: int
    in_blocks: int  # of these parameters
    tensors: int
    collectives: Collectives
    state_bytes: int | None  # weights, gradients and moments; None on real tensors


class _Counter(TorchDispatchMode):
    """Counts collectives of PyTorch, whether Python, FSDP2 or DDP's reducer in C++ calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with the tensors and collectives that it consists of
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name not in KINDS:
            assert name == "wait_tensor", f"torch.distributed called {name}, which is not counted"
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


def _group_size(args: Any) -> int:
    """Return the size of the process group among an operator's arguments: an object, or a name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).size()
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(name).size()


def simulate(network: Network, sharding: Sharding, accumulation: int = 1) -> Step:
    """Run steps of rank 0 with the trainer's own engine, and return the last.

    Sets the process group and variables of this process, so each call needs a process of its own.
    """
    fake = sharding.engine == FSDP2
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    engine = _engine(sharding, accumulation)
    with mode:
        model = network.build(sharding.precision)
        optimizer = build_optimizer(model, OptimConfig(), "cpu")
    sizes = {name: (parameter.numel(), ".blocks." in f".{name}") for name, parameter in model.named_parameters()}
    # Outside of the mode: device meshes read the numbers of their ranks. Fake weights stay fake.
    engine.prepare(model, optimizer)
    if sharding.engine == DDP:
        # DDP checks the annotation, which this module's are texts.
        _all_reduce.__annotations__ = {"bucket": dist.GradBucket}
        engine.model.register_comm_hook(None, _all_reduce)
    if fake:
        # Accelerate finds the wrapped parameters by their addresses, which fake ones do not have.
        engine.optimizer.optimizer = build_optimizer(engine.unwrapped_model, OptimConfig(), "cpu")
    counter = _Counter()
    with mode:
        engine.warm_up(partial(_loss, data=network.data))
        # DeepSpeed rearranges its gathers after the first steps; under FSDP2 all steps are alike.
        for _ in range(1 if fake else 3):
            counter.counts = Collectives()
            with counter:
                _accumulate(engine, network.data, accumulation)
            held = _bytes(_weights_and_gradients(engine)) if fake else None
            with counter:
                engine.update(1e-4, 1.0)
    if held is not None:  # the update has created the moments
        held += _bytes(value for values in engine.unwrapped_optimizer.state.values() for value in values.values())
    return Step(
        parameters=sum(size for size, _ in sizes.values()),
        in_blocks=sum(size for size, in_block in sizes.values() if in_block),
        tensors=len(sizes),
        collectives=counter.counts,
        state_bytes=held,
    )


def _engine(sharding: Sharding, accumulation: int) -> Engine:
    """Return the engine that a launcher with `sharding.world_size` processes would start."""
    world = sharding.world_size
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE="8")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # which nothing opens
    if sharding.engine == FSDP2:
        os.environ.update(
            ACCELERATE_USE_FSDP="true",
            FSDP_VERSION="2",
            FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
            FSDP_TRANSFORMER_CLS_TO_WRAP=FSDP_BLOCK_CLASS,
            FSDP_RESHARD_AFTER_FORWARD="true",
        )
    if sharding.replicas > 1:
        os.environ.update(
            ACCELERATE_USE_PARALLELISM_CONFIG="true",
            PARALLELISM_CONFIG_DP_REPLICATE_SIZE=str(sharding.replicas),
            PARALLELISM_CONFIG_DP_SHARD_SIZE=str(sharding.shards),
        )
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    file = f"ds_configs/{sharding.engine}.json" if sharding.engine in ZERO_ENGINES else None
    launch = read_launcher_env(os.environ, file)
    plan = StepPlan(SAMPLES, accumulation, SAMPLES * accumulation * world, 1.0, sharding.precision)
    deepspeed = resolve_deepspeed_config(launch.deepspeed, launch.deepspeed_file, plan) if launch.deepspeed else None
    accelerator = _build_accelerator(DistributedConfig(), launch, plan, deepspeed)
    accelerator.device_placement = False  # fake weights cannot move
    return _engine_class(launch.engine)(accelerator, launch, None)


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


def _weights_and_gradients(engine: Engine) -> Iterator[Tensor | None]:
    for parameter in engine.unwrapped_model.parameters():
        yield parameter
        yield parameter.grad


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the tensors' memory on this rank, each memory once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
