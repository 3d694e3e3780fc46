"""One way to start, and one object through which the loop reaches Accelerate and torch.distributed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

# Accelerate imports deepspeed, which would warn of every machine without a GPU.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from mmldlm.errors import ConfigError
from mmldlm.runtime.config import DistributedConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """What came of one optimizer step."""

    grad_norm: float
    skipped: bool


class Runtime:
    """The processes of this run: who they are, and what they do together."""

    def __init__(self, accelerator: Accelerator, engine: str):
        self.accelerator, self.engine = accelerator, engine
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world_size: int = accelerator.num_processes
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Wrap model and optimizer for the engine; afterwards they are `self.model` and `self.optimizer`."""
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    @property
    def bare_model(self) -> nn.Module:
        """The model without the engine's wrapper: for saving and for reading its parameters by name."""
        # Without keep_fp32_wrapper, Accelerate would take the autocast off the model for good.
        return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def accumulate(self, micro_batches: Sequence[T]) -> Iterator[T]:
        """The micro-batches of one step; gradients are exchanged with the last one's backward only."""
        for index, micro_batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                yield micro_batch

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's share of the step's loss; data parallelism averages, we want the sum."""
        self.accelerator.backward(loss * self.world_size)

    def update(self, lr: float, clip_norm: float) -> Update:
        """Clip and step at learning rate `lr`. A norm that is not finite leaves every weight as it was."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip_norm or float("inf"))
        grad_norm = float(norm)
        finite = grad_norm == grad_norm and abs(grad_norm) != float("inf")
        if finite:
            for group in self.bare_optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm, skipped=not finite)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks, on the host in float64; every rank gets the same bits."""
        total = values.detach().to("cpu", torch.float64, copy=True)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def start(config: DistributedConfig, precision: Literal["fp32", "bf16"]) -> Runtime:
    """Join the process group that the launcher describes and build the runtime on it.

    Raises `ConfigError` where what came is not what was asked for: a launcher that would train separate
    copies, an engine that is not there, another world size.
    """
    environment = os.environ
    world_size, engine = _asked(environment)
    use_cuda = torch.cuda.is_available()
    if world_size > 1 and not dist.is_initialized():
        if use_cuda:
            torch.cuda.set_device(int(environment["LOCAL_RANK"]))
        # Ours first: the timeout of a group that others start is not the one asked for.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo", timeout=timedelta(seconds=config.timeout_s)
        )
    AcceleratorState._reset_state(reset_partial_state=True)  # one process may train several runs, one after another
    accelerator = Accelerator(cpu=not use_cuda, mixed_precision="bf16" if precision == "bf16" else "no")
    if accelerator.num_processes != world_size:
        raise ConfigError(f"world size: {world_size} asked for by the launcher, {accelerator.num_processes} came")
    runtime = Runtime(accelerator, engine)
    if world_size > 1 and int(runtime.sum(torch.ones(1))) != world_size:
        raise ConfigError(f"world size: {world_size} asked for, but an all-reduce of ones gave another sum")
    return runtime


def _asked(environment: Mapping[str, str]) -> tuple[int, str]:
    """World size and engine that the launcher's environment asks for."""
    for flag, engine in (("ACCELERATE_USE_FSDP", "fsdp2"), ("ACCELERATE_USE_DEEPSPEED", "deepspeed")):
        if environment.get(flag, "false").lower() == "true":
            raise ConfigError(f"engine: {engine} asked for by the launcher, but this release has single and ddp")
    if "MASTER_ADDR" in environment and "LOCAL_RANK" not in environment:
        raise ConfigError(
            "launcher: MASTER_ADDR is set but LOCAL_RANK is not: every process would train a copy of its own; "
            "use `distributed_type: MULTI_GPU` without `use_cpu` in the accelerate config, or torchrun"
        )
    world_size = asked_world_size()
    return world_size, "single" if world_size == 1 else "ddp"


def asked_world_size() -> int:
    """Processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, Any]:
    import accelerate

    import mmldlm

    return {"mmldlm": mmldlm.__version__, "torch": torch.__version__, "accelerate": accelerate.__version__}
