"""FSDP2: parameters, gradients and optimizer state are DTensors, of which each rank holds a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from mmldlm.checkpoint.state import load_optimizer_state, model_state
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.grad_scaler import to_local


def fsdp_plugin(precision: str, block_class: str) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin that shards by modules of class `block_class`.

    Options that are not set here come from the launcher's FSDP_ variables. In bf16 and fp16 the gathered copies have
    that type, which halves the traffic and rounds as autocast does for each matrix. Gradients are reduced in float32,
    and the shards that the optimizer updates stay float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block_class],
        mixed_precision_policy=policy,
        # Each rank initializes the model from the same seed, and the model checkpoints its activations itself.
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )


class FSDP2Engine(Engine):
    """A model sharded by `fully_shard`."""

    shards_parameters = True

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = model_state(self.unwrapped_model)
        load_optimizer_state(
            self.unwrapped_optimizer,
            self.unwrapped_model,
            {entry: _shard_like(tensor, parameters.get(entry.rpartition("/")[0])) for entry, tensor in tensors.items()},
        )

    @property
    def replica(self) -> int:
        mesh = self._sharded_parameter().device_mesh
        return _coordinate(mesh)[0] if mesh.ndim > 1 else 0

    @property
    def num_replicas(self) -> int:
        mesh = self._sharded_parameter().device_mesh
        return mesh.size(0) if mesh.ndim > 1 else 1

    def _sharded_parameter(self) -> DTensor:
        parameter = next(iter(self._parameters()))
        assert isinstance(parameter, DTensor)
        return parameter

    def _shard_start(self, parameter: nn.Parameter) -> int:
        assert isinstance(parameter, DTensor)
        # The last dimension of the mesh shards the rows, in parts as those of `torch.chunk`; one before it replicates.
        mesh, rows = parameter.device_mesh, parameter.shape[0]
        chunk = -(-rows // mesh.size(mesh.ndim - 1))
        return min(_coordinate(mesh)[-1] * chunk, rows) * (parameter.numel() // rows)

    def _master_params(self) -> list[Tensor]:
        return [to_local(parameter) for parameter in self._parameters()]

    def _sync_model_from_masters(self) -> None:
        """Free the gathered parameters that a forward pass kept (the root's), which would be used as the weights."""
        for module in self.unwrapped_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _clip_gradients(self, max_norm: float) -> Tensor:
        if self.launch.replicas == 1:
            return super()._clip_gradients(max_norm)
        # Each replica sums over its shards by itself. Norms that differ in the last bit would let the replicas drift
        # apart, or only some of them skip a step, so all take the largest.
        parameters: list[Any] = [parameter for parameter in self._parameters() if parameter.grad is not None]
        norm = self._unshard(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
        mesh = parameters[0].device_mesh  # replicas x shards
        dist.all_reduce(norm, dist.ReduceOp.MAX, mesh.get_group(0))
        nn.utils.clip_grads_with_norm_(parameters, max_norm, DTensor.from_local(norm, mesh))
        return norm

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        super()._set_master(parameter, _shard_like(value, parameter))

    def _unshard(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """Return this rank's place in each dimension of the mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh"
    return coordinate


def _shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's shard of the full `tensor`, which every rank has.

    A tensor of another shape than `like` is returned as it is: a 0-d step count, or an error that the loader reports.
    """
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    # With `src_data_rank=None` each rank slices its own copy; otherwise rank 0 would scatter it.
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
