"""`Engine`: the one object through which a run reaches its processes. This is the replicated engine (one process
and DDP); FSDP2 and ZeRO override what differs.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from mmldlm.checkpoint.state import clean_name, load_optimizer_state, model_state, optimizer_state
from mmldlm.distributed.collectives import Collectives
from mmldlm.distributed.grad_scaler import LossScale
from mmldlm.distributed.launcher import DDP, LauncherEnv
from mmldlm.distributed.watchdog import Watchdog
from mmldlm.optim.weight_average import WeightAverage

T = TypeVar("T")


def is_accepted(norm: Tensor, limit: float) -> Tensor:
    """Whether a step may be taken with gradients of this norm: bool, where the norm is, which nobody waits for.

    All judge by this one rule, on the device and on the host, in float64: a norm that is not finite is above any limit.
    """
    return norm.double() <= min(limit, sys.float_info.max)


class Engine(Collectives):
    """The processes of this run, and what they do together with one model."""

    exchange_bytes = 0  # memory of the device that the engine takes within a backward pass and gives back after it
    average: WeightAverage | None = None  # of the trained weights, see `keep_average`
    loss_scale: LossScale | None = None  # in fp16

    def __init__(self, accelerator: Accelerator, launch: LauncherEnv, watchdog: Watchdog | None):
        super().__init__(launch.rank, launch.world_size, watchdog)
        self.accelerator, self.launch, self.engine = accelerator, launch, launch.engine
        self.device: torch.device = accelerator.device
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer

    # --- training -----------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wrap model and optimizer for the engine; afterwards they are `self.model` and `self.optimizer`."""
        with self.in_collective("wrapping the model"), warnings.catch_warnings():
            # Accelerate knows the argument by the name that PyTorch is about to drop.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @cached_property
    def unwrapped_model(self) -> nn.Module:
        """The model without the engine's wrapper; callable where `shards_parameters`, too, if all ranks call it."""
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)

    @property
    def unwrapped_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network, for the objective."""
        return self._call(self.model, *args, **kwargs)

    def eval_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same without gradients to come: for validation and samples."""
        return self._call(self.unwrapped_model, *args, **kwargs)

    def _call(self, network: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with (
            self.in_collective("forward: gather of the parameters")
            if self.shards_parameters
            else contextlib.nullcontext()
        ):
            return network(*args, **kwargs)

    def rehearse(self, loss_of: Callable[[Callable[..., Any]], Tensor]) -> None:
        """Collective, before the first step: one forward and backward whose gradients are thrown away.

        DDP records its graph in its first backward, which must exchange gradients (PyTorch fails in an assertion of
        its own where it does not), and packs its buckets anew after it. After this every step is like any other, and
        so a resumed run gives the same bits. `loss_of` gets the network.
        """
        if self.engine != DDP:
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self.backward(loss_of(self.forward))
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, micro_batches: Sequence[T]) -> Generator[T]:
        """The micro-batches of one step; gradients are exchanged with the last one's backward only."""
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                yield micro_batch

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's share of the step's loss; data parallelism averages, we want the sum."""
        # Scaled, the mean becomes the sum in `update`: float16 has no room to spare for that.
        factor = self.world_size if self.loss_scale is None else self.loss_scale.now
        with self.in_collective("backward: reduction of the gradients"):
            self.accelerator.backward(loss * factor)

    def update(self, lr: float, clip_norm: float, norm_limit: float = math.inf, decay: float = 0.0) -> Tensor:
        """Clip and step at learning rate `lr`. Returns the norm before clipping [], on the device, equal on all ranks.

        A norm that does not fit changes no weight and no moment. That is decided on the device, for which the host does
        not wait; it does where the optimizer is not fused, and where DDP's hook keeps something of the gradients.
        `decay` is the share that stays of the weights' average, where one is kept.
        """
        if self.loss_scale is not None:
            self.loss_scale.unscale(self._parameters(), self.world_size)
        with self.in_collective("norm of the gradients"):
            norm = self._whole(self.accelerator.clip_grad_norm_(self.model.parameters(), clip_norm or float("inf")))
        self._set_lr(lr)
        self._step(norm, norm_limit)
        self._forget_errors(norm, norm_limit)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.follow(is_accepted(norm, norm_limit), decay)
        if self.loss_scale is not None:
            self.loss_scale.follow(norm)
        return norm

    def _step(self, norm: Tensor, norm_limit: float) -> None:
        optimizer: Any = self.unwrapped_optimizer
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            # What `GradScaler` says to fused optimizers: where it is 1, their kernel leaves all as it is.
            optimizer.found_inf = 1 - is_accepted(norm, norm_limit).float()
            self.optimizer.step()
            optimizer.found_inf = None
        elif is_accepted(norm, norm_limit):
            with self.in_collective("optimizer step"):  # Muon gathers what FSDP2 shards
                self.optimizer.step()

    def _forget_errors(self, norm: Tensor, norm_limit: float) -> None:
        """PowerSGD adds what it left out of one step's gradients to the next, and starts from its last matrices.

        None of a skipped step may come back. Its hook waits for the device in each step, so we may, too.
        """
        for _, state in getattr(self.model, "_comm_hooks", ()):
            if isinstance(state, PowerSGDState) and not is_accepted(norm, norm_limit):
                for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                    memory.clear()

    def _set_lr(self, lr: float) -> None:
        for group in self.unwrapped_optimizer.param_groups:
            group["lr"] = lr

    # --- the average of the weights ------------------------------------------------------------------------

    def keep_average(self, saved: Mapping[str, Tensor]) -> None:
        """Collective, after `prepare`: from here on `update` keeps a moving average of the trained weights.

        It begins as `saved`, whole tensors by clean name, and for weights that are not there as they are now.
        """
        self.average = WeightAverage(self._masters())
        self.average.exchange()
        with self.in_collective("setting the average of the weights"), torch.no_grad():
            for name, parameter in self._trained():
                if name in saved:
                    self._set_master(parameter, saved[name])
        self.average.exchange()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Collective: within it the network computes with the average of its weights.

        An error within it ends the run, so nothing is put back then, which might wait for ranks that are lost.
        """
        assert self.average is not None
        self.average.exchange()
        self._sync_model_from_masters()
        yield
        self.average.exchange()
        self._sync_model_from_masters()

    def _masters(self) -> list[Tensor]:
        """This rank's tensors that the optimizer steps."""
        return self._parameters()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.unwrapped_optimizer.param_groups for parameter in group["params"]]

    def _sync_model_from_masters(self) -> None:
        """Collective: have the network compute with the masters as they are now."""

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((clean_name(n), p) for n, p in self.unwrapped_model.named_parameters() if p.requires_grad)

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """Collective: a trained parameter, whole, in float32."""
        return self._whole(parameter.detach())

    def _set_master(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Collective: the same, written; every rank has it."""
        parameter.copy_(whole)

    # --- state, by parameter name and the same under every engine ------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Elements of every tensor of the model, whole, by clean name; the same on every rank."""
        return {name: tensor.numel() for name, tensor in model_state(self.unwrapped_model).items()}

    def gather_state(self, owned: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
        """Collective, to be exhausted: what this rank owns of the state, as (group, entry, whole tensor).

        "model": float32 weights by clean name. "optimizer": state of the weights in `owned`, see `optimizer_state`.
        "ema": the average of the trained weights, where one is kept. Each tensor is to be copied before the next.
        """
        with self.in_collective("gather of the state"):
            for name, tensor in model_state(self.unwrapped_model).items():
                whole = self._whole(tensor)
                if name in owned:
                    yield "model", name, whole
            for entry, tensor in optimizer_state(self.unwrapped_optimizer, self.unwrapped_model).items():
                whole = self._whole(tensor)
                if entry.rpartition("/")[0] in owned:
                    yield "optimizer", entry, whole
        yield from self._gather_average(owned)

    def _gather_average(self, owned: Container[str]) -> Iterator[tuple[str, str, Tensor]]:
        if self.average is None:
            return
        self.average.exchange()
        with self.in_collective("gather of the average of the weights"):
            for name, parameter in self._trained():
                whole = self._master(parameter)
                if name in owned:
                    yield "ema", name, whole
        self.average.exchange()

    def _whole(self, tensor: Tensor) -> Tensor:
        """Collective: a tensor of the state without the engine's sharding."""
        return tensor

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Collective, after `prepare`: put back the "optimizer" of `gather_state`, whole; DataError if it is not."""
        load_optimizer_state(self.unwrapped_optimizer, self.unwrapped_model, tensors)

    def check_precision(self) -> None:
        """Assert that what the optimizer updates is float32, whatever the matrix products run in."""
        for group in self.unwrapped_optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype == torch.float32, f"master weights are {parameter.dtype} under {self.engine}"
