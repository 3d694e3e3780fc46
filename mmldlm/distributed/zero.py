"""DeepSpeed ZeRO 1, 2 and 3, with and without offload to the host.

The engine is driven directly, since it clips, steps and handles overflow itself. Its state is read and written through
DeepSpeed's per-parameter functions, so that checkpoints are the same as under every other engine.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from mmldlm.checkpoint.state import NO_STATE, check_optimizer_entries, clean_name, model_state
from mmldlm.distributed.deepspeed_adam import replay_steps
from mmldlm.distributed.engine import Engine, Shard, is_accepted

T = TypeVar("T")


class ZeroEngine(Engine):
    """A model and its optimizer in a DeepSpeed engine."""

    _norm_limit = math.inf

    @property
    def stage(self) -> int:
        """ZeRO stage: 1, 2 or 3."""
        return int(self.name[len("zero")])

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.shards_parameters = self.stage == 3
        # DeepSpeed rounds the weights before it copies them to its masters, and frozen weights have no masters.
        initial = {name: tensor.cpu().clone() for name, tensor in model_state(model).items()}
        # DeepSpeed calls these functions by names that PyTorch has deprecated.
        warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
        with _keep_zero_optimizer():
            super().prepare(model, optimizer)
        self._frozen = {
            clean_name(n): initial[clean_name(n)] for n, p in model.named_parameters() if not p.requires_grad
        }
        with self.in_collective("setting the master weights"):
            for name, parameter in self._trainable_params():
                self._set_master(parameter, initial[name])
        self._patch_overflow_check()

    def _patch_overflow_check(self) -> None:
        """Make DeepSpeed's step treat a rejected gradient norm as an overflow, which drops all gradients.

        Unpatched, it steps with a norm of any size. The patch acts between its computation of the norm and its own
        handling of overflows.
        """
        optimizer = self.zero_optimizer
        optimizer.compute_grad_norm, optimizer.check_grad_overflow = True, False  # the norm shows overflows, too
        # ZeRO-3 combines the norms of the groups within `step`, so there the function before that is wrapped.
        norm_name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        compute_norm, update_scale = getattr(optimizer, norm_name), optimizer._update_scale

        def record_norm() -> Any:
            result = compute_norm()
            norm = float(combine_grad_norm_groups(result) if self.stage == 3 else result)
            self._norm = torch.tensor(norm, dtype=torch.float64)
            return result

        def check_norm(overflow: bool) -> None:
            # `step` reads this attribute after the call, and on overflow drops the gradients.
            optimizer.overflow = overflow or not is_accepted(self._norm, self._norm_limit)
            if self._norm_limit >= 0:  # otherwise `drop_gradients`, which DeepSpeed would report as an overflow
                update_scale(optimizer.overflow)

        setattr(optimizer, norm_name, record_norm)
        optimizer._update_scale = check_norm

    @property
    def deepspeed(self) -> Any:
        """The DeepSpeed engine around the model."""
        return self.model

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.deepspeed.module

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's ZeRO optimizer, which holds partitions, masters and overflow state."""
        return self.deepspeed.optimizer

    @property
    def unwrapped_optimizer(self) -> torch.optim.Optimizer:
        return self.zero_optimizer.optimizer

    @property
    def comm_buffer_bytes(self) -> int:  # type: ignore[override]
        optimizer = self.zero_optimizer
        if self.stage == 3 or not optimizer.contiguous_gradients:
            return 0
        # With `overlap_comm` one buffer is filled while the other is reduced.
        buffers = len(optimizer.ipg_buckets) * (2 if optimizer.overlap_comm else 1)
        return buffers * optimizer.reduce_bucket_size * optimizer._gradient_reduction_buffer_dtype().itemsize

    def accumulate(self, micro_batches: Sequence[T]) -> Generator[T]:
        """Yield the micro-batches of one step.

        ZeRO-1 reduces gradients with the last one, ZeRO-2 and 3 with each, since no rank holds unsharded gradients.
        """
        for index, micro_batch in enumerate(micro_batches):
            self.deepspeed.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            yield micro_batch

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and, by default, micro-batches; this loss is a share of the step's loss.
        with self.in_collective("backward: reduction of the gradients"):
            self.deepspeed.backward(loss * self.world_size, scale_wrt_gas=False)
        if self.stage == 1 and self.deepspeed.is_gradient_accumulation_boundary():
            # Drops gradients that are reduced, in bf16 views into the buffers of the exchange, which DeepSpeed keeps
            # until the next forward pass.
            self.zero_optimizer.clear_backward_seen_flag()

    def update(self, lr: float, clip_norm: float, norm_limit: float = math.inf, ema_decay: float = 0.0) -> Tensor:
        """Step as `Engine.update` does; DeepSpeed clips, and synchronizes the host for the norm.

        Returns:
            Gradient norm before clipping: [], on the device; infinite if DeepSpeed's is non-finite.
        """
        self._set_lr(lr)
        self._norm_limit = norm_limit
        with self.in_collective("optimizer step: overflow, norm and new parameters"):
            self.deepspeed.step()
        if self.ema is not None:
            self.ema.update(is_accepted(self._norm, norm_limit), ema_decay)
        return self._norm.to(self.device, non_blocking=True)

    @property
    def replica(self) -> int:
        return 0 if self.stage == 3 else self.rank

    @property
    def num_replicas(self) -> int:
        return 1

    def local_shards(self, gradients: bool = False) -> Iterator[Shard]:
        if gradients and self.device.type == "cuda":
            torch.cuda.synchronize()  # with offload, gradients are still on their way to the host
        optimizer, partitions = self.zero_optimizer, self._partitions()
        parameters: Iterator[tuple[str, Any]] = self._trainable_params()  # with attributes of DeepSpeed
        for name, parameter in parameters:
            gradient: Tensor | None = None
            if self.stage == 3:
                group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = optimizer._get_param_partition_rank(parameter) * size
                size = max(0, min(size, parameter.ds_numel - start))  # the rest is padding
                network_weight = parameter.ds_tensor.detach()[:size]
                if gradients:
                    gradient = optimizer.get_local_fp32_grad_for_param(parameter)[:size]
            elif parameter._hp_mapping is None:  # in the partitions of other ranks alone
                continue
            else:
                mapping = parameter._hp_mapping
                group, address = mapping.param_group_index, mapping.hp_fragment_address
                offset, size, start = address.start, address.numel, mapping.lp_fragment_address.start
                network_weight = parameter.detach().reshape(-1)[start : start + size]
                if gradients:
                    gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
                    # In bf16 DeepSpeed may keep the gradient of the whole tensor.
                    gradient = gradient[start:][:size] if len(gradient) == parameter.numel() else gradient[:size]
            part = slice(offset, offset + size)
            state = self.unwrapped_optimizer.state.get(partitions[group], {})
            state = {
                key: value[part] if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()
            }
            yield Shard(name, start, partitions[group].detach()[part], gradient, state, network_weight)

    def network_weights(self) -> Iterator[tuple[str, int, Tensor]]:
        if self.stage == 3:
            return super().network_weights()
        return ((name, 0, parameter.detach().reshape(-1)) for name, parameter in self._trainable_params())

    def drop_gradients(self) -> None:
        # DeepSpeed drops them where they are, as for a step that is skipped.
        self._norm_limit = -1.0
        with self.in_collective("optimizer step: overflow"):
            self.deepspeed.step()

    def _master_params(self) -> list[Tensor]:
        return self._partitions()

    def _sync_model_from_masters(self) -> None:
        """Round the weights that the network computes with from the masters, as DeepSpeed does after a step."""
        optimizer = self.zero_optimizer
        with self.in_collective("gather of the weights"):
            if self.stage < 3:
                optimizer.update_lp_params()
                return
            # As ZeRO-3's own `step` and `_post_step` do, in their order.
            optimizer._partition_all_parameters()
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:  # small ones, which stay gathered between the steps
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
            optimizer.invalidate_secondary_tensor()

    def _get_master(self, parameter: nn.Parameter) -> Tensor:
        return safe_get_full_fp32_param(parameter).view(self._shape(parameter))

    def _set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        safe_set_full_fp32_param(parameter, value.to(self.device))

    def sizes(self) -> dict[str, int]:
        parameters = {clean_name(n): self._shape(p).numel() for n, p in self.unwrapped_model.named_parameters()}
        return {**super().sizes(), **parameters}

    def gather_state(self, owned: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
        # Frozen weights come from before the rounding, buffers from the model, all else from the masters.
        buffers = {clean_name(name) for name, _ in self.unwrapped_model.named_buffers()}
        state = model_state(self.unwrapped_model)
        for name, tensor in {**self._frozen, **{name: state[name] for name in state if name in buffers}}.items():
            if name in owned:
                yield "model", name, tensor
        step, keys = self._optimizer_layout()
        if step is not None:
            self._link_optimizer_state()
        with self.in_collective("gather of the state"):
            for name, parameter in self._trainable_params():
                # These gathers are collective, so they come before the check of the owner.
                entries = [("model", name, self._get_master(parameter))]
                entries += [
                    ("optimizer", f"{name}/{key}", safe_get_full_optimizer_state(parameter, key)) for key in keys
                ]
                if name not in owned:
                    continue
                yield from ((group, entry, full.view(self._shape(parameter))) for group, entry, full in entries)
                if step is not None:
                    yield "optimizer", f"{name}/step", step
                else:
                    yield "optimizer", f"{name}/{NO_STATE}", torch.empty(0)
        yield from self._gather_ema(owned)

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self._trainable_params())
        check_optimizer_entries({name: self._shape(parameter) for name, parameter in parameters.items()}, tensors)
        keys = sorted({entry.rpartition("/")[2] for entry in tensors} - {"step", NO_STATE})
        # DeepSpeed has one step count for all: parameters that were frozen before start with zero moments and the
        # step count of the others.
        new = {entry.rpartition("/")[0] for entry in tensors if entry.endswith(NO_STATE)}
        if not keys:
            return
        step = next(tensor for entry, tensor in tensors.items() if entry.endswith("/step"))
        self._create_optimizer_state(step, keys)
        with self.in_collective("setting the optimizer state"):
            for name, parameter in parameters.items():
                for key in keys if name not in new else ():
                    safe_set_full_optimizer_state(parameter, tensors[f"{name}/{key}"].to(self.device), key)

    def _partitions(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimizer updates."""
        optimizer = self.zero_optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _optimizer_layout(self) -> tuple[Tensor | None, list[str]]:
        """Return the step count and the names of the moments; (None, []) before the first step."""
        state = self.unwrapped_optimizer.state.get(self._partitions()[0], {})
        # Moments are flat tensors; PyTorch's step count is a tensor without dimensions.
        moments = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        if not moments:
            return None, []
        return torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone(), moments

    def _create_optimizer_state(self, step: Tensor, keys: Sequence[str]) -> None:
        """Create the state that the inner optimizer would create at its first step.

        PyTorch's AdamW counts steps in a tensor, DeepSpeed's optimizers in a Python number.
        """
        in_tensors = isinstance(self.unwrapped_optimizer, torch.optim.AdamW)
        for partition in self._partitions():
            state = {key: torch.zeros_like(partition) for key in keys}
            self.unwrapped_optimizer.state[partition] = {"step": step.clone() if in_tensors else int(step), **state}
        if not in_tensors:
            replay_steps(self.unwrapped_optimizer, int(step))
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Map each parameter of ZeRO-1 and 2 to its moments.

        DeepSpeed does so within its first step, but after the step of its first parameter group, and omits the other
        groups.
        """
        optimizer = self.zero_optimizer
        if self.stage < 3:
            for parameters, partition in zip(optimizer.bit16_groups, self._partitions(), strict=True):
                lazy_init_hp_params_optimizer_state(parameters, partition, optimizer.optimizer.state)

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty tensor between the steps

    def check_precision(self) -> None:
        for partition in self._partitions():
            assert partition.dtype == torch.float32, f"master weights are {partition.dtype} under {self.name}"

    def close(self) -> None:
        if hasattr(self, "model") and not self.peer_lost:
            self.deepspeed.destroy()
        super().close()


@contextlib.contextmanager
def _keep_zero_optimizer() -> Iterator[None]:
    """Have DeepSpeed build its ZeRO optimizer for every stage and precision.

    For ZeRO-1 in bf16 with gradients accumulated in float32 it would choose `BF16_Optimizer` instead, which has neither
    the state nor the overflow check of the others, although its ZeRO optimizer accumulates so as well.
    """
    sanity_check = DeepSpeedEngine._do_optimizer_sanity_check

    def check(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> str:
        sanity_check(engine, optimizer)
        return ZERO_OPTIMIZATION

    DeepSpeedEngine._do_optimizer_sanity_check = check
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = sanity_check
