"""DeepSpeed ZeRO 1, 2 and 3, with and without offload to the host.

The engine is driven directly: it clips, steps and decides on overflow by itself. Its state is read and written
through DeepSpeed's per-parameter functions, so that checkpoints are the same as under every other engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from mmldlm.checkpoint.state import NO_STATE, check_optimizer_entries, clean_name, model_state
from mmldlm.runtime.engine import Runtime, Update

T = TypeVar("T")


class ZeroRuntime(Runtime):
    @property
    def stage(self) -> int:
        return int(self.engine[len("zero")])

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.shards_parameters = self.stage == 3
        # DeepSpeed rounds the weights before it makes its masters of them, and frozen ones have no masters.
        initial = {name: tensor.cpu().clone() for name, tensor in model_state(model).items()}
        # DeepSpeed calls it by the name that PyTorch is about to drop.
        warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
        super().prepare(model, optimizer)
        self._frozen = {
            clean_name(n): initial[clean_name(n)] for n, p in model.named_parameters() if not p.requires_grad
        }
        with self.waiting("setting the master weights"):
            for name, parameter in self._trained():
                safe_set_full_fp32_param(parameter, initial[name].to(self.device))

    @property
    def deepspeed(self) -> Any:
        """The DeepSpeed engine around the model."""
        return self.model

    @property
    def bare_model(self) -> nn.Module:
        return self.deepspeed.module

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's own: partitions, masters, overflow."""
        return self.deepspeed.optimizer

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        return self.zero_optimizer.optimizer

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((clean_name(n), p) for n, p in self.bare_model.named_parameters() if p.requires_grad)

    def accumulate(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """ZeRO-1 exchanges gradients with the last micro-batch; 2 and 3 with each, since none holds them whole."""
        for index, micro_batch in enumerate(micro_batches):
            self.deepspeed.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            yield micro_batch

    def backward(self, loss: Tensor) -> None:
        with self.waiting("backward: reduction of the gradients"):
            self.deepspeed.backward(loss * self.world_size, scale_wrt_gas=False)

    def update(self, lr: float, clip_norm: float) -> Update:
        """The norm is that before clipping. DeepSpeed skips by itself, on all ranks, where it is not finite."""
        self._set_lr(lr)
        with self.waiting("optimizer step: overflow, norm and new parameters"):
            self.deepspeed.step()
        skipped = bool(self.zero_optimizer.overflow)
        return Update(float("inf") if skipped else float(self.deepspeed.get_global_grad_norm()), skipped)

    def gather_state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        weights = dict(self._frozen)
        moments: dict[str, Tensor] = {}
        step, keys = self._optimizer_layout()
        if step is not None:
            self._link_optimizer_state()
        with self.waiting("gather of the state"):
            for name, parameter in self._trained():
                weight = safe_get_full_fp32_param(parameter)
                if self.is_main:
                    weights[name] = weight.view(self._shape(parameter)).cpu().clone()
                if step is None:
                    moments[f"{name}/{NO_STATE}"] = torch.empty(0)
                    continue
                moments[f"{name}/step"] = step
                for key in keys:
                    moment = safe_get_full_optimizer_state(parameter, key)
                    if self.is_main:
                        moments[f"{name}/{key}"] = moment.view(self._shape(parameter)).cpu().clone()
        weights.update((name, t) for name, t in model_state(self.bare_model).items() if name in self._buffers())
        return (weights, moments) if self.is_main else ({}, {})

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        trained = dict(self._trained())
        check_optimizer_entries({name: self._shape(parameter) for name, parameter in trained.items()}, tensors)
        keys = sorted({entry.rpartition("/")[2] for entry in tensors} - {"step", NO_STATE})
        # One step count for all: parameters that were frozen before start with zeros and the others' count.
        new = {entry.rpartition("/")[0] for entry in tensors if entry.endswith(NO_STATE)}
        if not keys:
            return
        step = next(tensor for entry, tensor in tensors.items() if entry.endswith("/step"))
        self._create_optimizer_state(step, keys)
        with self.waiting("setting the optimizer state"):
            for name, parameter in trained.items():
                for key in keys if name not in new else ():
                    safe_set_full_optimizer_state(parameter, tensors[f"{name}/{key}"].to(self.device), key)

    def _partitions(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimizer updates."""
        optimizer = self.zero_optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _optimizer_layout(self) -> tuple[Tensor | None, list[str]]:
        """Step count and names of the moments; (None, []) before the first step."""
        state = self.bare_optimizer.state.get(self._partitions()[0], {})
        moments = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        if not moments:
            return None, []
        return torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone(), moments

    def _create_optimizer_state(self, step: Tensor, keys: Sequence[str]) -> None:
        """What the inner optimizer would create at its first step."""
        for partition in self._partitions():
            state = {key: torch.zeros_like(partition) for key in keys}
            self.bare_optimizer.state[partition] = {"step": step.clone(), **state}
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Tell each parameter of ZeRO-1 and 2 where its moments lie.

        DeepSpeed does so within its first step, but after the step of its first parameter group,
        and leaves out the others.
        """
        optimizer = self.zero_optimizer
        if self.stage < 3:
            for parameters, partition in zip(optimizer.bit16_groups, self._partitions(), strict=True):
                lazy_init_hp_params_optimizer_state(parameters, partition, optimizer.optimizer.state)

    def _buffers(self) -> set[str]:
        return {clean_name(name) for name, _ in self.bare_model.named_buffers()}

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def check_precision(self) -> None:
        for partition in self._partitions():
            assert partition.dtype == torch.float32, f"master weights are {partition.dtype} under {self.engine}"

    def close(self) -> None:
        if hasattr(self, "model") and not self.peer_lost:
            self.deepspeed.destroy()
        super().close()
