"""DeepSpeed ZeRO 1, 2 and 3, with and without offload to the host.

We call DeepSpeed's engine directly, because it clips, steps and handles overflow itself. We read and write its state
through DeepSpeed's per-parameter functions, so checkpoints are the same as under every other engine.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.utils import (
    groups,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from mmldlm.checkpoint.slices import SlicedTensor
from mmldlm.checkpoint.state import NO_STATE, check_optimizer_entries, clean_name, model_state
from mmldlm.checkpoint.tensors import read_range
from mmldlm.distributed.deepspeed_adam import replay_steps
from mmldlm.distributed.engine import Engine, follows_parameters, is_accepted, owners_by_size
from mmldlm.utils.meta_device import materialize

T = TypeVar("T")


class ZeroEngine(Engine):
    """A model and its optimizer in a DeepSpeed engine."""

    model: Any  # DeepSpeed's engine around the network
    _norm_limit = math.inf

    @property
    def stage(self) -> int:
        """ZeRO stage: 1, 2 or 3."""
        return int(self.name[len("zero")])

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
        self.shards_parameters = self.stage == 3
        # DeepSpeed keeps no float32 masters of frozen weights, so each rank keeps them from before the rounding.
        with self.raise_on_all_ranks("loading of the frozen weights"):
            self._frozen = {
                clean_name(name): weights[clean_name(name)]
                for name, parameter in model.named_parameters()
                if not parameter.requires_grad
            }
        # DeepSpeed calls these functions by names that PyTorch has deprecated.
        warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor.*", category=FutureWarning)
        with follows_parameters(optimizer, model):
            self._materialize(model)
        with _keep_zero_optimizer():
            self._wrap(model, optimizer)
        self._starts = self._gather_starts() if self.stage < 3 else {}
        # DeepSpeed rounds weights before it copies them to its masters, so we load the masters ourselves.
        with self.raise_on_all_ranks("loading of the master weights"):
            for name, parameter in self._trainable_params():
                self._load_master(parameter, name, weights)
        self._sync_model_from_masters()
        self._patch_overflow_check()

    @torch.no_grad()
    def _materialize(self, model: nn.Module) -> None:
        """Allocate all parameters. Under ZeRO-3 we go module by module, so that no rank ever holds the whole model."""
        partition: Any = None
        if self.stage == 3:
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            with self._set_up("partitioning the model"):
                # On a module without parameters it only patches linear layers to save memory, as for a whole model.
                partition = deepspeed.zero.Init(nn.Module(), config_dict_or_path=config)
        for prefix, module in model.named_modules():
            materialize(module, self.device, recurse=False)
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if not parameter.requires_grad:
                    parameter.copy_(self._frozen[clean_name(name)])
                if partition is not None:
                    parameter.data = parameter.to(partition.dtype)
            if partition is not None:
                with self._set_up("partitioning the model"):
                    partition._convert_to_zero_parameters(module.parameters(recurse=False))

    def _patch_overflow_check(self) -> None:
        """Make DeepSpeed treat a rejected gradient norm as an overflow, so that it drops all gradients.

        Unpatched, it would step with a norm of any size. We hook in after it computes the norm and before it handles
        overflows.
        """
        optimizer = self.zero_optimizer
        optimizer.compute_grad_norm, optimizer.check_grad_overflow = True, False  # the norm shows overflows as well
        # ZeRO-3 combines the norms of its groups inside `step`, so for ZeRO-3 we wrap the function before that.
        norm_name = "_get_norm_groups" if self.stage == 3 else "scaled_global_norm"
        compute_norm, update_scale = getattr(optimizer, norm_name), optimizer._update_scale

        def record_norm() -> Any:
            result = compute_norm()
            norm = float(combine_grad_norm_groups(result) if self.stage == 3 else result)
            self._norm = torch.tensor(norm, dtype=torch.float64)
            return result

        def check_norm(overflow: bool) -> None:
            # `step` reads this attribute after the call and drops the gradients on overflow.
            optimizer.overflow = overflow or not is_accepted(self._norm, self._norm_limit)
            update_scale(optimizer.overflow)

        setattr(optimizer, norm_name, record_norm)
        optimizer._update_scale = check_norm

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.model.module

    @property
    def zero_optimizer(self) -> Any:
        """DeepSpeed's ZeRO optimizer. It holds partitions, masters and the overflow state."""
        return self.model.optimizer

    @property
    def unwrapped_optimizer(self) -> torch.optim.Optimizer:
        return self.zero_optimizer.optimizer

    @property
    def comm_buffer_bytes(self) -> int:  # type: ignore[override]
        optimizer = self.zero_optimizer
        if self.stage == 3 or not optimizer.contiguous_gradients:
            return 0
        # With `overlap_comm`, one buffer fills while the other is reduced.
        buffers = len(optimizer.ipg_buckets) * (2 if optimizer.overlap_comm else 1)
        return buffers * optimizer.reduce_bucket_size * optimizer._gradient_reduction_buffer_dtype().itemsize

    def accumulate(self, micro_batches: Sequence[T]) -> Generator[T]:
        """Yield the micro-batches of one step.

        ZeRO-1 reduces gradients after the last one. ZeRO-2 and 3 reduce after each, as no rank holds whole gradients.
        """
        for index, micro_batch in enumerate(micro_batches):
            self.model.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            yield micro_batch

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks and, by default, over micro-batches. We need sums: see `Engine.backward`.
        with self.in_collective("backward: reduction of the gradients"):
            self.model.backward(loss * self.world_size, scale_wrt_gas=False)
        if self.stage == 1 and self.model.is_gradient_accumulation_boundary():
            # This drops gradients that are already reduced. In bf16 they are views into the communication buffers, and
            # DeepSpeed would keep them until the next forward pass.
            self.zero_optimizer.clear_backward_seen_flag()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trainable_params():
            with self.in_collective("gather of a gradient"):
                gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                yield name, gradient / self.zero_optimizer.loss_scale  # the scale is 1 except in fp16

    def update(self, lr: float, clip_norm: float, norm_limit: float = math.inf, ema_decay: float = 0.0) -> Tensor:
        """Step as `Engine.update` does. DeepSpeed clips, and makes the host wait for the norm.

        If DeepSpeed's norm is non-finite, the returned norm is infinite.
        """
        self._set_lr(lr)
        self._norm_limit = norm_limit
        with self.in_collective("optimizer step: overflow, norm and new parameters"):
            self.model.step()
        if self.ema is not None:
            self.ema.update(is_accepted(self._norm, norm_limit), ema_decay)
        return self._norm.to(self.device, non_blocking=True)

    @property
    def replica(self) -> int:
        return 0 if self.stage == 3 else self.rank

    def network_weights(self) -> Iterator[tuple[str, int, Tensor]]:
        for name, parameter in self._trainable_params():
            fragment, start = self._fragment(parameter) if self.stage == 3 else (parameter.detach().reshape(-1), 0)
            yield name, start, fragment

    def copied_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        parameters: Iterator[tuple[str, Any]] = self._trainable_params()  # DeepSpeed adds attributes
        for name, parameter in parameters:
            fragment, start = self._fragment(parameter)
            copy = parameter.ds_tensor if self.stage == 3 else parameter.reshape(-1)[start:]
            yield name, copy.detach()[: len(fragment)], fragment

    def _sync_model_from_masters(self) -> None:
        """Set the network's weights to the rounded masters, as DeepSpeed does after a step."""
        optimizer = self.zero_optimizer
        with self.in_collective("gather of the weights"):
            if self.stage < 3:
                optimizer.update_lp_params()
                return
            # The same calls, in the same order, as in ZeRO-3's own `step` and `_post_step`.
            optimizer._partition_all_parameters()
            for group in range(len(optimizer.fp16_groups)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            if optimizer.persistent_parameters:  # small parameters stay gathered between steps
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
            optimizer.invalidate_secondary_tensor()

    def local_state(self) -> Iterator[tuple[str, str, SlicedTensor, Tensor]]:
        # Frozen weights are from before the rounding, buffers are the model's, and everything else is the masters'.
        for name, tensor in self._replicated.items():
            yield "model", name, *self._part(tensor, name)
        step, keys = self._optimizer_layout()
        for name, parameter in self._trainable_params():
            yield "model", name, *self._master_part(parameter, name)
            for key in keys:
                yield "optimizer", f"{name}/{key}", self._slices(parameter, name), self._fragment(parameter, key)[0]
            entry, tensor = (NO_STATE, torch.empty(0)) if step is None else ("step", step)
            yield "optimizer", f"{name}/{entry}", *self._part(tensor, name)
        yield from self._local_ema()

    @property
    def _replicated(self) -> dict[str, Tensor]:
        """Frozen weights and buffers. Every rank has all of them."""
        state = model_state(self.unwrapped_model)
        buffers = {clean_name(name) for name, _ in self.unwrapped_model.named_buffers()}
        return {**self._frozen, **{name: state[name] for name in state if name in buffers}}

    @cached_property
    def _owners(self) -> dict[str, int]:
        return owners_by_size({name: tensor.numel() for name, tensor in self._replicated.items()}, self.num_writers)

    def _master_part(self, parameter: nn.Parameter, name: str) -> tuple[SlicedTensor, Tensor]:
        return self._slices(parameter, name), self._fragment(parameter)[0]

    def _slices(self, parameter: Any, name: str) -> SlicedTensor:
        """Return which rank holds which elements of a trained parameter and of its moments."""
        like = torch.empty(self._shape(parameter), device="meta")
        return SlicedTensor.like(like, parameter.ds_tensor.ds_numel if self.stage == 3 else self._starts[name])

    def _gather_starts(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return (start, rank) of each fragment by parameter, under ZeRO-1 and 2 (collective).

        A fragment is a rank's part of the parameter: these stages partition padded groups of parameters.
        """
        fragments = {name: self._fragment(parameter) for name, parameter in self._trainable_params()}
        starts = {name: start for name, (fragment, start) in fragments.items() if fragment.numel()}
        pieces: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for rank, own in enumerate(self.gather(starts, "fragments of the weights")):
            for name, start in own.items():
                pieces[name].append((start, rank))
        return {name: tuple(sorted(found)) for name, found in pieces.items()}

    def _fragment(self, parameter: Any, key: str | None = None) -> tuple[Tensor, int]:
        """Return (fragment, start): this rank's part of a parameter's master weight, or of its moment `key`."""
        if self.stage == 3:
            fragment = (
                safe_get_local_fp32_param(parameter) if key is None else safe_get_local_optimizer_state(parameter, key)
            )
            start = min(self.rank * fragment.numel(), parameter.ds_numel)
            return fragment.detach()[: parameter.ds_numel - start], start  # without the padding
        mapping = parameter._hp_mapping
        if mapping is None:  # only other ranks have a part of it
            return torch.empty(0), 0
        partition, address = self._master_params()[mapping.param_group_index], mapping.hp_fragment_address
        flat = partition if key is None else self.unwrapped_optimizer.state[partition][key]
        return flat.detach().narrow(0, address.start, address.numel), mapping.lp_fragment_address.start

    def _load_master(self, parameter: Any, name: str, tensors: Mapping[str, Tensor], key: str | None = None) -> None:
        """Set this rank's fragment of a master weight, or of its moment `key`, from the whole `tensors[name]`."""
        fragment, start = self._fragment(parameter, key)
        values = read_range(tensors, name, start, start + fragment.numel())
        if self.stage < 3:
            fragment.copy_(values)
            return
        padded = nn.functional.pad(values.to(self.device), (0, parameter.ds_tensor.ds_numel - len(values)))
        if key is None:
            safe_set_local_fp32_param(parameter, padded)
        else:
            safe_set_local_optimizer_state(parameter, padded, key)

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self._trainable_params())
        check_optimizer_entries({name: self._shape(parameter) for name, parameter in parameters.items()}, tensors)
        keys = sorted({entry.rpartition("/")[2] for entry in tensors} - {"step", NO_STATE})
        # DeepSpeed has one step count for all parameters. So parameters that were frozen before start with zero moments
        # and with the step count of the others.
        new = {entry.rpartition("/")[0] for entry in tensors if entry.endswith(NO_STATE)}
        if not keys:
            return
        step = tensors[next(entry for entry in tensors if entry.endswith("/step"))]
        self._create_optimizer_state(step, keys)
        for name, parameter in parameters.items():
            for key in keys if name not in new else ():
                self._load_master(parameter, f"{name}/{key}", tensors, key)

    def _master_params(self) -> list[Tensor]:
        """The flat float32 partitions that the inner optimizer updates."""
        optimizer = self.zero_optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return list(optimizer.single_partition_of_fp32_groups)

    def _optimizer_layout(self) -> tuple[Tensor | None, list[str]]:
        """Return (step count, names of the moments), or (None, []) before the first step."""
        state = self.unwrapped_optimizer.state.get(self._master_params()[0], {})
        # Moments are flat tensors, while PyTorch's step count is a tensor without dimensions.
        moments = [key for key, value in state.items() if isinstance(value, Tensor) and value.dim()]
        if not moments:
            return None, []
        return torch.as_tensor(state["step"], dtype=torch.float32).cpu().clone(), moments

    def _create_optimizer_state(self, step: Tensor, keys: Sequence[str]) -> None:
        """Create the state that the inner optimizer would create in its first step.

        PyTorch's AdamW counts steps in a tensor, DeepSpeed's optimizers in a Python number.
        """
        in_tensors = isinstance(self.unwrapped_optimizer, torch.optim.AdamW)
        for partition in self._master_params():
            state = {key: torch.zeros_like(partition) for key in keys}
            self.unwrapped_optimizer.state[partition] = {"step": step.clone() if in_tensors else int(step), **state}
        if not in_tensors:
            replay_steps(self.unwrapped_optimizer, int(step))

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)  # between steps, ZeRO-3 leaves an empty tensor

    def close(self) -> None:
        if hasattr(self, "model") and not self.peer_lost:
            self.model.destroy()
        super().close()
        groups._WORLD_GROUP = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # a later start creates new groups


@contextlib.contextmanager
def _keep_zero_optimizer() -> Iterator[None]:
    """Have DeepSpeed build its ZeRO optimizer for every stage and precision.

    For ZeRO-1 in bf16 with float32 accumulation it would choose `BF16_Optimizer`, which lacks that state and overflow
    check.
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
