"""`mmldlm.train` whose ranks compute different updates from a step on: FAULT=kind, FAULT_STEP=step, counted from 0.

Kinds, of which all but the first are faults of rank 1:

- reduction: gradients are not summed over the ranks
- noise: noise of its own
- accumulation: the first micro-batch is lost
- lr: another learning rate in the optimizer
- stale: the optimizer's first tensor is not updated
- copy: an element of the weights that its network computes with is another one
- cuts: another number of reductions of the learning rate, with `schedule.lr=plateau`
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mmldlm.batch import Batch
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.step_numbers import StepResult
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

RANK, KIND, STEP = int(os.environ["RANK"]), os.environ["FAULT"], int(os.environ["FAULT_STEP"])
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")
alone: set[int] = set()  # steps whose present backward pass reduces over this rank alone


class Done:
    def wait(self) -> bool:
        return True


def replace_reduction(name: str) -> None:
    """Make a function of torch.distributed reduce over this rank alone while `alone` is not empty."""
    original: Callable[..., Any] = getattr(dist, name)

    def reduce(*arguments: Any, **options: Any) -> Any:
        if not alone:
            return original(*arguments, **options)
        output, *scattered = [value for value in (*arguments, *options.values()) if isinstance(value, Tensor)]
        for tensor in scattered:
            output.copy_(tensor.reshape(-1).chunk(dist.get_world_size())[RANK].view_as(output))
        return Done()

    setattr(dist, name, reduce)


# Before the engines look them up.
for reduction in REDUCTIONS:
    replace_reduction(reduction)


class FaultyTrainer(Trainer):
    def __enter__(self) -> "FaultyTrainer":
        super().__enter__()
        optimizer, kept = self.engine.unwrapped_optimizer, []

        def before(*_: Any) -> None:
            if self.is_faulty("lr"):
                for group in optimizer.param_groups:
                    group["lr"] = 2e-3
            first = next(p for group in optimizer.param_groups for p in group["params"])
            kept[:] = [(first, first.detach().clone())]

        def after(*_: Any) -> None:
            if self.is_faulty("stale"):
                with torch.no_grad():
                    kept[0][0].copy_(kept[0][1])

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        if isinstance(self.engine.model, DistributedDataParallel):
            self.engine.model.register_comm_hook(None, self.reduce_bucket)
        return self

    def is_faulty(self, kind: str) -> bool:
        return kind == KIND and self.state.step >= STEP and (RANK == 1 or kind == "reduction")

    def reduce_bucket(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP does itself, in C++, where it cannot be replaced."""
        mean = bucket.buffer() / self.engine.world_size
        dist.all_reduce(mean)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(mean)
        return future

    def update(self, step: int) -> StepResult:
        update = self.engine.update

        def update_and_change(*arguments: Any) -> Tensor:
            norm = update(*arguments)
            parameter = self.engine.unwrapped_model.token_embedding.weight
            getattr(parameter, "ds_tensor", parameter).detach().view(-1)[1] += 0.5
            return norm

        if self.is_faulty("copy"):
            self.engine.update = update_and_change
        if self.is_faulty("cuts"):
            self.state.lr_cuts = 1
        return super().update(step)

    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        return super().corrupt(step + 1000 if self.is_faulty("noise") else step, micro_batches)

    def accumulate(self, noised: Sequence[NoisedBatch]) -> Iterator[NoisedBatch]:
        self.is_first = True
        return super().accumulate(noised)

    def backward(self, loss: Tensor) -> None:
        lost = self.is_first and self.is_faulty("accumulation")
        self.is_first = False
        if self.is_faulty("reduction"):
            alone.add(self.state.step)
        super().backward(loss * 0 if lost else loss)
        alone.clear()


train_and_exit(FaultyTrainer)
