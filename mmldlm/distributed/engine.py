"""`Engine`: the interface between a run and its ranks.

`Engine` itself is the replicated engine: a single process or DDP. FSDP2 and ZeRO are subclasses.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from mmldlm.checkpoint.slices import SlicedTensor
from mmldlm.checkpoint.state import clean_name, load_model_state, load_optimizer_state, model_state, optimizer_state
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.compute_time import ComputeTimer
from mmldlm.distributed.grad_scaler import LossScale, to_local
from mmldlm.distributed.launch import DDP, LauncherEnv
from mmldlm.distributed.library_calls import library_call
from mmldlm.distributed.process_group import set_group_timeouts
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.optim.ema import EmaWeights
from mmldlm.utils.meta_device import materialize
from mmldlm.utils.partition import partition_by_size

T = TypeVar("T")
SUM_NUMEL = 2**24  # gradient elements that one all-reduce adds up: 64 MiB in float32


def is_accepted(grad_norm: Tensor, limit: float) -> Tensor:
    """Return whether a step with this norm updates the weights: bool [], on the norm's device, without a host sync.

    Device and host both decide by this function. It compares in float64, and a non-finite norm exceeds every limit.
    """
    # A comparison with NaN is false. Without the minimum, an infinite norm would pass an infinite limit.
    return grad_norm.double() <= min(limit, sys.float_info.max)


def owners_by_size(sizes: Mapping[str, int], writers: int) -> dict[str, int]:
    """Choose a writer for each tensor, so that all writers write about the same number of elements."""
    parts = partition_by_size(sizes, writers)
    return {name: writer for writer, names in enumerate(parts) for name in names}


@contextlib.contextmanager
def follows_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """Point the optimizer to the new parameters, by name, if the context replaces parameters of the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    yield
    parameters = dict(model.named_parameters())
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in members]


class Engine(Collectives):
    """The ranks of a run and the model that they train: forward, backward, update, EMA and state."""

    comm_buffer_bytes = 0  # device memory that the engine needs during a backward pass only
    ema: EmaWeights | None = None  # see `enable_ema`
    loss_scale: LossScale | None = None  # in fp16
    # Needed by replayed backward passes, which no library sees: gradients keep their memory from step to step, and we
    # add up the ranks' gradients ourselves after the last micro-batch. Only a replicated engine can do this.
    sums_after_backward = False

    def __init__(self, accelerator: Accelerator, launch: LauncherEnv, watchdog: Watchdog | None):
        super().__init__(launch.rank, launch.world_size, watchdog)
        self.accelerator, self.launch, self.name = accelerator, launch, launch.engine
        self.device = accelerator.device
        if str(self.device) == "cuda":  # in a single process; `set_device` needs an index
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer

    # --- training -----------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]) -> None:
        """Wrap the model, which is on the meta device, and the optimizer as `self.model` and `self.optimizer`.

        `weights` are initial weights, or the group "model" of a checkpoint that `check_model_state` has accepted. Each
        rank reads only its own part. A damaged file is a `DataError`.
        """
        with follows_parameters(optimizer, model):
            materialize(model, self.device)
        with self.raise_on_all_ranks("loading of the weights"):
            load_model_state(model, weights)
        self._wrap(model, optimizer)

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with self._set_up("wrapping the model"), warnings.catch_warnings():
            # Accelerate passes this argument by a name that PyTorch has deprecated.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            # Accelerate slices the mesh of replicas x shards in a way that PyTorch has deprecated.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if self.watchdog is not None:
            set_group_timeouts(self.watchdog.timeout_s)

    @contextlib.contextmanager
    def _set_up(self, name: str) -> Iterator[None]:
        """Context for calls of Accelerate or DeepSpeed (collective)."""
        with self.in_collective(name), library_call(self.launch.source, self.launch.accelerate):
            yield

    @cached_property
    def unwrapped_model(self) -> nn.Module:
        """The model without the engine's wrapper. With `shards_parameters`, its forward pass is collective."""
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)

    @property
    def unwrapped_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @cached_property
    def compute_timer(self) -> ComputeTimer:
        """Measures how long this rank computes."""
        blocks = self.unwrapped_model.get_submodule("blocks").children()
        on_cuda = self.device.type == "cuda" and self.world_size > 1
        return ComputeTimer([] if self.sums_after_backward else blocks, on_cuda)  # hooks do not run in a replayed graph

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in training. The objective calls this as its network."""
        return self._call(self.unwrapped_model if self.sums_after_backward else self.model, *args, **kwargs)

    def eval_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unwrapped model for validation and generation, without a backward pass to follow."""
        return self._call(self.unwrapped_model, *args, **kwargs)

    def _call(self, network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.shards_parameters:
            return network(*args, **kwargs)
        with self.in_collective("forward: gather of the parameters"):
            return network(*args, **kwargs)

    def warm_up(self, loss_fn: Callable[[Callable[..., Any]], Tensor]) -> None:
        """Run forward and backward twice before the first step and discard the gradients (collective).

        DDP records its graph in the first backward, which must reduce gradients, or an assertion in PyTorch fails. It
        records the order of gradients in the second one and then rebuilds its buckets. After the warm-up all steps add
        the ranks' gradients in the same order, so a resumed run is bit-identical.
        """
        if self.name != DDP or self.sums_after_backward:
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for _ in range(2):
                self.backward(loss_fn(self.forward))
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, micro_batches: Sequence[T]) -> Generator[T]:
        """Yield the micro-batches of a step. Only the backward pass of the last one reduces gradients."""
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            # The caller runs forward and backward while this generator is suspended, so inside this context.
            reduces_at_once = last or self.sums_after_backward
            with contextlib.nullcontext() if reduces_at_once else self.accelerator.no_sync(self.model):
                yield micro_batch

    def backward(self, loss: Tensor) -> None:
        """Compute gradients. `loss` is this rank's share of the step's loss, so we sum the ranks' gradients."""
        # Under a loss scale, `complete_gradients` multiplies by the ranks instead: float16 has no range to spare.
        factor = self._averaged_ranks if self.loss_scale is None else self.loss_scale.scale
        with self.in_collective("backward: reduction of the gradients"):
            self.accelerator.backward(loss * factor)

    def complete_gradients(self) -> None:
        """Sum gradients over the ranks if DDP does not, and divide out the loss scale. Call it once before `update`."""
        if self.sums_after_backward:
            self._sum_gradients()
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters(), self._averaged_ranks)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of each trained weight, summed over the ranks and before clipping (collective).

        Call this between `complete_gradients` and `update`, for example in `Callback.before_update`. Under every engine
        you get whole tensors, equal on all ranks. FSDP2 and ZeRO gather them one by one, so all ranks must consume the
        whole iterator.
        """
        for name, parameter in self._trainable_params():
            if parameter.grad is not None:
                yield name, parameter.grad

    def update(self, lr: float, clip_norm: float, norm_limit: float = math.inf, ema_decay: float = 0.0) -> Tensor:
        """Clip the gradients, step the optimizer at learning rate `lr` and update the EMA (collective).

        If the gradient norm is non-finite or above `norm_limit`, no weight, moment or average changes. The device
        decides this without a host sync, unless the optimizer is not fused. A `clip_norm` of 0 clips nothing. Return
        the norm before clipping: [], on the device, equal on all ranks.
        """
        with self.in_collective("norm of the gradients"):
            norm = self._clip_gradients(clip_norm or math.inf)  # an infinite limit only computes the norm
        self._set_lr(lr)
        self._step(norm, norm_limit)
        self.optimizer.zero_grad(set_to_none=not self.sums_after_backward)
        if self.ema is not None:
            self.ema.update(is_accepted(norm, norm_limit), ema_decay)
        if self.loss_scale is not None:
            self.loss_scale.update(norm)
        return norm

    @property
    def _averaged_ranks(self) -> int:
        """Number of ranks that the library averages gradients over. We multiply the loss by it to get sums."""
        return 1 if self.sums_after_backward else self.world_size

    def local_gradients(self) -> list[Tensor]:
        """Return this rank's gradients, or its shards of them. Parameters without a gradient are left out."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _sum_gradients(self) -> None:
        """Add up the gradients of all ranks in place, several tensors per all-reduce (collective)."""
        gradients = self.local_gradients()
        while gradients and self.world_size > 1:
            part, numel = [gradients.pop()], 0
            while gradients and (numel := numel + part[-1].numel()) + gradients[-1].numel() <= SUM_NUMEL:
                part.append(gradients.pop())
            buffer = torch.cat([gradient.flatten() for gradient in part])
            with self.in_collective("reduction of the gradients"):
                dist.all_reduce(buffer)
            sums = buffer.split([gradient.numel() for gradient in part])
            torch._foreach_copy_(part, [own.view_as(gradient) for own, gradient in zip(sums, part, strict=True)])

    def _clip_gradients(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm` and return the norm before, equal on all ranks (collective)."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return self._scale_gradients(gradients, torch.nn.utils.get_total_norm(gradients), max_norm)

    def _scale_gradients(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> Tensor:
        """Clip gradients that have this norm, as `torch.nn.utils.clip_grads_with_norm_` does, and return the norm."""
        optimizer, factor = cast(Any, self.unwrapped_optimizer), (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.device.type == "cuda" and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = 1 / factor  # its kernel divides the gradients by this: one pass less over them
        else:
            torch._foreach_mul_(gradients, factor)
        return norm

    def _step(self, norm: Tensor, norm_limit: float) -> None:
        """Step the optimizer if the norm is accepted. The host waits for the norm unless the optimizer is fused."""
        optimizer: Any = self.unwrapped_optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # `GradScaler` tells fused optimizers about overflows in this way. If `found_inf` is 1, their kernel changes
            # nothing.
            optimizer.found_inf = 1 - is_accepted(norm, norm_limit).float()
            self.optimizer.step()
            optimizer.found_inf = optimizer.grad_scale = None
        elif is_accepted(norm, norm_limit):
            with self.in_collective("optimizer step"):  # under FSDP2, Muon gathers gradients
                self.optimizer.step()

    def _set_lr(self, lr: float) -> None:
        for group in self.unwrapped_optimizer.param_groups:
            group["lr"] = lr

    # --- weights for the comparison of replicas, see `mmldlm.trainer.replica_check` ------------------------

    @property
    def replica(self) -> int:
        """Index of the model copy (replica) that this rank computes with or holds a shard of."""
        return self.rank

    def network_weights(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, start, elements) of this rank's part of the trained weights: flat, from index `start` on."""
        for name, parameter in self._trainable_params():
            yield name, self._shard_start(parameter), to_local(parameter.detach()).reshape(-1)

    def copied_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name, copy, master): this rank's part of weights that the engine keeps twice, as ZeRO does."""
        yield from ()

    def _shard_start(self, parameter: nn.Parameter) -> int:
        return 0

    # --- EMA ----------------------------------------------------------------------------------------------

    def enable_ema(self, saved: Mapping[str, Tensor]) -> None:
        """Keep an EMA of the trained weights from here on (collective; after `prepare`).

        It starts from the averages in `saved`, by clean name. A weight without a saved average starts from its current
        value. A damaged checkpoint file is a `DataError`.
        """
        self.ema = EmaWeights(self._master_params())
        # While swapped, the averages stand in place of the weights, so `_load_master` writes to them.
        self.ema.swap()
        with self.raise_on_all_ranks("loading of the EMA weights"), torch.no_grad():
            for name, parameter in self._trainable_params():
                if name in saved:
                    self._load_master(parameter, name, saved)
        self.ema.swap()

    @contextlib.contextmanager
    def ema_scope(self) -> Iterator[None]:
        """Compute with the EMA weights within the context (collective).

        An error in the body ends the run. Then the weights are not restored, since that might wait for lost ranks.
        """
        assert self.ema is not None
        self.ema.swap()
        self._sync_model_from_masters()
        yield
        self.ema.swap()
        self._sync_model_from_masters()

    def _master_params(self) -> list[Tensor]:
        """Tensors of this rank that the optimizer updates."""
        return self._parameters()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.unwrapped_optimizer.param_groups for parameter in group["params"]]

    def _sync_model_from_masters(self) -> None:
        """Make the network compute with the current master weights (collective)."""

    def _trainable_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((clean_name(n), p) for n, p in self.unwrapped_model.named_parameters() if p.requires_grad)

    def _load_master(self, parameter: nn.Parameter, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's part of a trained parameter's master weight from the whole tensor `tensors[name]`."""
        self._load_part(parameter.detach(), name, tensors)

    # --- state, by parameter name and the same under every engine ------------------------------------------

    @property
    def writer(self) -> int | None:
        """This rank's number among the writers of a checkpoint, or None if it writes nothing."""
        return self.rank

    @property
    def num_writers(self) -> int:
        """Number of ranks that write a checkpoint."""
        return self.world_size

    def local_state(self) -> Iterator[tuple[str, str, SlicedTensor, Tensor]]:
        """Yield the state as (group, entry, description of the tensor, this rank's part), without communication.

        All ranks yield the same descriptions in the same order. The part is the slice that goes to this rank's file, or
        the whole tensor if another rank writes it. Copy each part before you draw the next one. The groups are:

        - "model": float32 weights by clean name
        - "optimizer": see `optimizer_state`
        - "ema": averages by clean name, if the run keeps an EMA
        """
        for name, tensor in model_state(self.unwrapped_model).items():
            yield "model", name, *self._part(tensor, name)
        for entry, tensor in optimizer_state(self.unwrapped_optimizer, self.unwrapped_model).items():
            yield "optimizer", entry, *self._part(tensor, entry.rpartition("/")[0])
        yield from self._local_ema()

    def _local_ema(self) -> Iterator[tuple[str, str, SlicedTensor, Tensor]]:
        if self.ema is not None:
            self.ema.swap()  # now the averages stand in place of the weights
            for name, parameter in self._trainable_params():
                yield "ema", name, *self._master_part(parameter, name)
            self.ema.swap()

    def _part(self, tensor: Tensor, name: str) -> tuple[SlicedTensor, Tensor]:
        """Describe a tensor of the weight `name`, and return it with this rank's part."""
        return SlicedTensor.like(tensor, ((0, self._owners.get(name, 0)),)), tensor

    def _master_part(self, parameter: nn.Parameter, name: str) -> tuple[SlicedTensor, Tensor]:
        return self._part(parameter.detach(), name)

    @cached_property
    def _owners(self) -> dict[str, int]:
        """Which writer saves each replicated tensor (0 if not named here). Constant over the run."""
        sizes = {name: tensor.numel() for name, tensor in model_state(self.unwrapped_model).items()}
        return owners_by_size(sizes, self.num_writers)

    def _load_part(self, tensor: Tensor, entry: str, tensors: Mapping[str, Tensor]) -> None:
        """Set this rank's part of a tensor of the state from the whole tensor `tensors[entry]`."""
        tensor.copy_(tensors[entry])

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the group "optimizer" of a checkpoint (after `prepare`). Each rank reads only its part.

        Entries or shapes that do not match this optimizer exactly, or a damaged file, are a `DataError`.
        """
        load_optimizer_state(self.unwrapped_optimizer, self.unwrapped_model, tensors)

    def check_precision(self) -> None:
        """Assert that the optimizer updates float32 weights, also if matrix products use another type."""
        for weights in self._master_params():
            assert weights.dtype == torch.float32, f"master weights are {weights.dtype} under {self.name}"
