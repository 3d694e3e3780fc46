"""FSDP2: each rank holds a shard of parameters, gradients and optimizer state, which are DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from mmldlm.checkpoint.slices import SlicedTensor
from mmldlm.checkpoint.state import load_optimizer_state, model_state
from mmldlm.checkpoint.tensors import meta_of, read_range
from mmldlm.distributed.engine import Engine, follows_parameters
from mmldlm.distributed.grad_scaler import to_local
from mmldlm.utils.meta_device import materialize


def fsdp_plugin(precision: str) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin that shards by blocks.

    All other options come from the launcher's FSDP_ variables. In bf16 and fp16 ranks gather copies in that type, which
    halves the traffic and rounds each matrix just as autocast does. Gradients are reduced in float32, and the optimizer
    updates float32 shards.
    """
    policy = MixedPrecisionPolicy(
        param_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MMDiTBlock"],
        mixed_precision_policy=policy,
        # Each rank computes or reads only its part of the weights, and our model checkpoints its activations itself.
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )


class FSDP2Engine(Engine):
    """A model that `fully_shard` shards over one dimension of a device mesh.

    With hybrid sharding the mesh has a second dimension, and the shards are replicated along it.
    """

    shards_parameters = True
    # One rank writes everything that is not sharded (step counts, small buffers): readers find it in one file.
    _owners: dict[str, int] = {}  # noqa: RUF012 - replaces the property of `Engine`

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
        # We shard on the meta device. There Accelerate cannot match the optimizer's parameters, so we do it by name.
        with follows_parameters(optimizer, model):
            self._wrap(model, optimizer)
            materialize(model, self.device)
        with self.raise_on_all_ranks("loading of the weights"), torch.no_grad():
            for name, tensor in model_state(self.unwrapped_model).items():
                self._load_part(tensor, name, weights)

    @cached_property
    def _place(self) -> _Place:
        """This rank's place in the mesh. It is the same for all parameters."""
        return _Place.of(next(p for p in self.unwrapped_model.parameters() if isinstance(p, DTensor)))

    @property
    def writer(self) -> int | None:
        return None if self._place.replica else self._place.shard

    @property
    def num_writers(self) -> int:
        return self._place.shards

    def _part(self, tensor: Tensor, name: str) -> tuple[SlicedTensor, Tensor]:
        if not isinstance(tensor, DTensor):
            return super()._part(tensor, name)
        return SlicedTensor.like(tensor, _Place.of(tensor).numel(tensor)), tensor.to_local()

    def _load_part(self, tensor: Tensor, entry: str, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(tensor, DTensor):
            super()._load_part(tensor, entry, tensors)
            return
        local, start = tensor.to_local(), _Place.of(tensor).start(tensor)
        local.copy_(read_range(tensors, entry, start, start + local.numel()).view_as(local))

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = {name: parameter.detach() for name, parameter in self._trainable_params()}
        parts = {}
        for entry, meta in meta_of(tensors).items():
            parameter = parameters.get(entry.rpartition("/")[0])
            if parameter is None or meta.shape != parameter.shape:  # a step count, or an entry to refuse below
                parts[entry] = tensors[entry]
                continue
            parts[entry] = torch.empty_like(parameter)
            self._load_part(parts[entry], entry, tensors)
        load_optimizer_state(self.unwrapped_optimizer, self.unwrapped_model, parts)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, gradient in super().gradients():
            with self.in_collective("gather of a gradient"):
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            yield name, whole

    @property
    def replica(self) -> int:
        return self._place.replica

    def _shard_start(self, parameter: nn.Parameter) -> int:
        return _Place.of(parameter).start(parameter)

    def _master_params(self) -> list[Tensor]:
        return [to_local(parameter) for parameter in self._parameters()]

    def _sync_model_from_masters(self) -> None:
        """Free parameters that the last forward pass kept gathered (the root's): the next one would use them."""
        for module in self.unwrapped_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip_gradients(self, max_norm: float) -> Tensor:
        # DTensor operations take much time on the host. So we work on local shards, and sum the squared norm of each
        # tensor over the shards.
        gradients = [to_local(parameter.grad) for parameter in self._parameters() if parameter.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        mesh = self._place.mesh
        dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norm = torch.linalg.vector_norm(squares.sqrt())
        if self.launch.replicas > 1:
            # Each replica sums over its own shards, so norms may differ in the last bit. Then replicas would drift
            # apart, or only some of them would skip a step. To prevent it, all take the largest norm.
            dist.all_reduce(norm, dist.ReduceOp.MAX, mesh.get_group(0))
        return self._scale_gradients(gradients, norm, max_norm)


@dataclass(frozen=True)
class _Place:
    """A rank's place in the mesh of a DTensor. The last dimension shards, and one before it replicates."""

    shard: int
    shards: int
    replica: int
    mesh: DeviceMesh

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        assert isinstance(tensor, DTensor)
        assert tensor.placements[-1].is_shard(0), f"expected shards of rows, found {tensor.placements}"
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not in the mesh"
        replica, shard = (0, *coordinate)[-2:]
        return cls(shard, mesh.size(mesh.ndim - 1), replica, mesh)

    def numel(self, tensor: Tensor) -> int:
        """Return the number of elements in each shard, as `torch.chunk` cuts it. The last shards may have fewer."""
        return -(-tensor.shape[0] // self.shards) * tensor.shape[1:].numel()

    def start(self, tensor: Tensor) -> int:
        """Return the index of the first element of this rank's shard."""
        return min(self.shard * self.numel(tensor), tensor.numel())
