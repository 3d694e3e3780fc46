"""Estimate of a run's parameters, FLOPs and memory without running it.

A few steps with their real micro-batches run through the real model, objective and optimizer on fake tensors, which
have shapes but no memory, under a `StepTracker`. `engine_memory` has what that means under each engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import mode_stages
from mmldlm.distributed.optimizers import build_optimizer, describe_optimizer
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.model.ops import assume_device
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.param_groups import muon_matrices
from mmldlm.run.factory import build_corruption, build_fake_model, build_objective
from mmldlm.trainer.engine_memory import FLOAT32, MIB, StepMemory
from mmldlm.trainer.memory_tracker import StepTracker

MAX_SEARCHED_STEPS = 4096  # of a stage that are searched for the largest micro-batch


@dataclass(frozen=True)
class Estimate:
    """Costs of an optimizer step."""

    parameters: dict[str, int]  # by part of the network
    step: StepMemory
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # of matrix products, forward and backward, over all ranks; mean over the run
    batches: dict[int, BatchSize]  # by the first step with this size
    largest_micro_batch: int  # text and latent tokens
    world_size: int
    optimizer: str  # the implementation

    @property
    def checkpoint_mib(self) -> float:
        """Host memory for copies of this process's share of weights, EMA and moments, from the first checkpoint on."""
        # Numbers: weights of all parameters; two moments, and with an EMA a third number, of the trained ones.
        step = self.step
        numbers = step.parameters + (3 if step.ema else 2) * step.trained - step.one_moment
        return numbers * FLOAT32 / self.world_size / MIB


def estimate(
    config: RunConfig, store: Store, world_size: int, steps_per_stage: int = 4, device: str | None = None
) -> Estimate:
    """Estimate the costs of one optimizer step, or raise `ConfigError` if a global batch cannot be divided evenly.

    A stage is a range of steps with the same modes and batch sizes. The real micro-batches of `steps_per_stage` at its
    start are tried; memory also covers its largest one. The `device` is by default that of this machine.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve_precision(config)
    config.train.check_batches(world_size)
    batch_at = partial(config.train.batch_at, world_size=world_size)
    loader = Loader(
        store, "train", replace(config.data, num_workers=0), config.run.seed, batch_at, world_size=world_size
    )
    # Only the model is fake; micro-batches are real, since their lengths and masks determine the costs.
    model = build_fake_model(config, store.manifest)
    objective = build_objective(config, store.manifest)
    corruption = build_corruption(config, objective)
    optimizer, name, one_moment = _optimizer(model, config.optim, device)
    tracker = StepTracker(model, objective)
    steps, batches = config.train.steps, config.train.batch_stages(world_size)
    starts = {*mode_stages(config.mode, config.mode_schedule), *batches}
    stages = list(pairwise([*sorted(start for start in starts if start < steps), steps]))
    if any(stop - start > steps_per_stage for start, stop in stages):  # otherwise all steps are tried, the first as is
        # A step without micro-batches creates the optimizer's state, so that all later steps count it.
        tracker.allocate_gradients()
        tracker.update(optimizer, 0.0)
    flops, samples, most_tokens, accumulates = 0.0, 0, 0, False
    keeps_gradients = device == "cuda" and world_size == 1 and config.compile.graphs  # for graphs, which add to them
    for start, stop in stages:
        size = batch_at(start)
        searched = range(start, min(stop, start + MAX_SEARCHED_STEPS))
        tokens, largest = loader.largest_step(searched, samples, size)
        most_tokens = max(most_tokens, tokens)
        place = samples + (largest - start) * size.global_batch_size
        owner = int(loader.micro_batch_tokens(place, size).max(axis=1).argmax())
        tried = [(step, 0) for step in range(start, min(stop, start + steps_per_stage))]
        # The largest step counts for memory alone, unless it is among the first ones.
        for step, rank in dict.fromkeys([*tried, (largest, owner)]):
            micro_batches = loader.read(samples + (step - start) * size.global_batch_size, size, rank)
            noised = corruption(step, micro_batches)
            if keeps_gradients:
                tracker.allocate_gradients()
            with assume_device(device):
                step_flops = tracker.micro_batches(noised)
            tracker.update(optimizer, config.optim.clip_norm)
            accumulates |= len(noised) > 1
            if (step, rank) in tried:  # mean over the stage, weighted by its share of the run
                flops += step_flops * world_size * (stop - start) / (steps * len(tried))
        # The position of the next stage in the sample order.
        samples += size.global_batch_size * (stop - start)
    return Estimate(
        parameters=count_parameters(model),
        step=StepMemory.of(tracker, accumulates, one_moment, config.ema.decay > 0),
        tokens_per_step=store.split("train").mean_length * samples / steps,
        flops_per_step=flops,
        batches=batches,
        largest_micro_batch=most_tokens,
        world_size=world_size,
        optimizer=name,
    )


def _optimizer(model: MMDiT, config: OptimConfig, device_type: str) -> tuple[torch.optim.Optimizer, str, int]:
    """Return (optimizer to try, name of the implementation of the run, number of parameters with one moment)."""
    if config.name == "deepspeed_adam":  # creating it would compile its kernel; AdamW has the same state
        name = "deepspeed.DeepSpeedCPUAdam if the engine offloads it, else deepspeed.FusedAdam"
        return build_optimizer(model, replace(config, name="adamw")), name, 0
    one_moment = muon_matrices(model) if config.name == "muon" else []
    optimizer = build_optimizer(model, config)
    if device_type == "cuda":
        for group in optimizer.param_groups:  # PyTorch's default for parameters on CUDA
            if group.get("fused") is False:
                group["foreach"] = True
    return optimizer, describe_optimizer(optimizer), sum(matrix.numel() for matrix in one_moment)
