"""FSDP2: parameters, gradients and optimizer state are DTensors, each rank holding its shard of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from mmldlm.checkpoint.state import load_optimizer_state, model_state
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.grad_scaler import local


def fsdp_plugin(precision: str, wrapped: str) -> FullyShardedDataParallelPlugin:
    """Shards by modules of class `wrapped`; what is not given here comes from the launcher's FSDP_ variables.

    In bf16 and fp16 the gathered copies are of that type, which halves the traffic: the same rounding that autocast
    does to each matrix. Gradients are reduced in float32, and the shards that the optimizer updates stay float32.
    """
    policy = MixedPrecisionPolicy(
        param_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[wrapped],
        mixed_precision_policy=policy,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )


class FSDP2Engine(Engine):
    shards_parameters = True

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = model_state(self.unwrapped_model)
        load_optimizer_state(
            self.unwrapped_optimizer,
            self.unwrapped_model,
            {entry: _as_sharded(tensor, parameters.get(entry.rpartition("/")[0])) for entry, tensor in tensors.items()},
        )

    def _masters(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters()]

    def _sync_model_from_masters(self) -> None:
        """What a forward pass has left gathered, as that of the root is, would be taken for the weights."""
        for module in self.unwrapped_model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _set_master(self, parameter: nn.Parameter, whole: Tensor) -> None:
        super()._set_master(parameter, _as_sharded(whole, parameter))

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_sharded(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's shard of a whole `tensor` that every rank has; other shapes are left to the loader's own check."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
