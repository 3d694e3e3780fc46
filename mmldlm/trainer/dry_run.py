"""Estimate of a run's parameters, FLOPs and memory without running it: `mmldlm train --dry-run`.

A few steps with their real micro-batches run through the real model, objective and optimizer on fake tensors, which
have shapes but no memory, under the `StepCostTracker` of `memory_tracker`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import prod

import numpy as np
import torch

from mmldlm.config import RunConfig, resolve_precision
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.mixture import open_data
from mmldlm.data.store import Store
from mmldlm.data.verify import drop_bad_samples
from mmldlm.diffusion.noise import mode_stages
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.capabilities import OFFLOAD_ENGINES, WEIGHT_SHARDING_ENGINES, ZERO_ENGINES, supports
from mmldlm.distributed.launcher import ENGINES, FSDP2, read_launcher_sizes
from mmldlm.distributed.optimizers import build_optimizer, describe_optimizer
from mmldlm.model.cpu_half import KernelCache
from mmldlm.model.mmdit import MMDiT, count_parameters
from mmldlm.model.ops import assume_device
from mmldlm.optim.config import OptimConfig
from mmldlm.optim.lr_schedule import describe_lr
from mmldlm.optim.param_groups import muon_matrices
from mmldlm.run.factory import attention_backend, build_fake_model, build_objective, corrupt_step
from mmldlm.settings.fields import to_yaml
from mmldlm.trainer.engine_costs import Sharding, padded_parameters, state_bytes
from mmldlm.trainer.memory_tracker import Kind, StepCostTracker
from mmldlm.trainer.setup import requested_features
from mmldlm.trainer.startup_report import batch_notices
from mmldlm.utils.progress import Progress

BYTES_PER_MOMENT = BYTES_PER_FROZEN = BYTES_PER_EMA = 4
MIB = 2**20
SIZED_STEPS = 64  # of a stage whose micro-batches are measured
GPU_TOKENS = 16_384  # of a micro-batch, below which a GPU of the present waits for the host
GPU_BUDGET = 32_768  # of train.micro_batch_tokens, which the dry run then advises
MAX_SEARCHED_STEPS = 4096  # of a stage that are searched for the largest micro-batch
MAX_ROW_STEPS = 256  # steps of a stage whose row counts are collected for the estimate of kernels
KIND_LABELS: dict[Kind, str] = {
    "weights": "weights",
    "ema": "EMA",
    "gradients": "gradients",
    "moments": "moments",
    "batches": "batches",
    "activations": "activations",
    "update": "temporaries of the update",
}


@dataclass(frozen=True)
class Estimate:
    """Costs of an optimizer step."""

    parameters: dict[str, int]  # by part of the network
    trained_shapes: Sequence[tuple[int, ...]]  # of the trained parameters
    tokens_per_step: float  # mean over the run
    flops_per_step: float  # of matrix products, forward and backward, over all ranks; mean over the run
    batches: dict[int, BatchSize]  # by the first step with this size, as are the next two
    world_size: int
    activations_mib: float  # their peak in forward and backward, for the largest micro-batch that was tried
    peak_mib: Mapping[Kind, float] = field(default_factory=dict)  # by kind, at the peak of their sum
    attention: str = ""  # the backend
    optimizer: str = ""  # the implementation
    one_moment: int = 0  # trained parameters with one moment instead of two (Muon's)
    ema: bool = False  # whether the run keeps an EMA of the trained weights
    kernels_mib: float = 0.0  # of kernels that oneDNN compiles for half precision on a CPU
    # Text and latent tokens of the micro-batches of all ranks, and what they would be under a budget of GPU_BUDGET.
    micro_batches: Mapping[int, np.ndarray] = field(default_factory=dict)
    advised: Mapping[int, np.ndarray] = field(default_factory=dict)

    @property
    def trainable(self) -> int:
        """Number of trained parameters."""
        return sum(map(prod, self.trained_shapes))

    @property
    def total_mib(self) -> float:
        """Peak memory of a process if the state is replicated; excludes kernels and checkpoint staging copies."""
        return sum(self.peak_mib.values())

    @property
    def checkpoint_mib(self) -> float:
        """Host memory for copies of this process's share of weights, EMA and moments, from the first checkpoint on."""
        # Numbers: weights of all parameters; two moments, and with an EMA a third number, of the trained ones.
        weights = sum(self.parameters.values()) + (3 if self.ema else 2) * self.trainable - self.one_moment
        return weights * BYTES_PER_MOMENT / self.world_size / MIB


def estimate(
    config: RunConfig,
    store: Store,
    world_size: int,
    steps_per_stage: int = 4,
    device: str | None = None,
    keep_gradients: bool | None = None,
) -> Estimate:
    """Estimate the costs of one optimizer step, or raise `ConfigError` if a global batch cannot be divided evenly.

    A stage is a range of steps with the same modes and batch sizes. Memory also covers the largest micro-batch of each
    stage.

    Args:
        steps_per_stage: Number of steps at the start of each stage whose real micro-batches are tried.
        device: "cpu" or "cuda"; by default the device of this machine.
        keep_gradients: Whether gradients stay allocated, as in DDP's buckets; by default with several processes.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = resolve_precision(config)
    config.train.check_batches(world_size)
    attention = f"{attention_backend(config, device)} on {device} in {config.precision}"
    loader = Loader(
        store,
        "train",
        replace(config.data, num_workers=0),
        config.run.seed,
        partial(config.train.batch_at, world_size=world_size),
        0,
        world_size,
    )
    # Only the model is fake; micro-batches are real, since their lengths and masks determine the costs.
    model = build_fake_model(config, store.manifest)
    objective = build_objective(config, store.manifest)
    optimizer, name, one_moment = _optimizer(model, config.optim, device)
    keep_gradients = world_size > 1 if keep_gradients is None else keep_gradients
    tracker = StepCostTracker(model, objective, keep_gradients, ema=config.ema.decay > 0)
    steps = config.train.steps
    batches = config.train.batch_stages(world_size)
    starts = {*mode_stages(config.mode, config.mode_schedule), *batches}
    stages = list(pairwise([*sorted(start for start in starts if start < steps), steps]))
    if any(stop - start > steps_per_stage for start, stop in stages):  # otherwise all steps are tried, the first as is
        tracker.init_moments(optimizer)
    flops, samples = 0.0, 0
    micro_batches: dict[int, np.ndarray] = {}
    advised: dict[int, np.ndarray] = {}
    kernels = KernelCache(device, config.precision)
    for start, stop in stages:
        noised_at = partial(_noised, config, loader, objective, (start, samples))
        tried = min(steps_per_stage, stop - start)
        searched = range(start, min(stop, start + MAX_SEARCHED_STEPS))
        _, largest = loader.largest_step(searched, samples, loader.batch_at(start))
        # The largest step counts for memory alone, unless it is among the first ones.
        for step in dict.fromkeys([*range(start, start + tried), largest]):
            noised = noised_at(step)
            kernels.add_tried(_row_counts(noised))
            with assume_device(device):
                step_flops = tracker.micro_batches(noised)
            tracker.update(optimizer, config.optim.clip_norm)
            if step < start + tried:  # mean over the stage, weighted by its share of the run
                flops += step_flops * world_size * (stop - start) / (steps * tried)
        # Steps that are not tried, whose row counts nevertheless need kernels.
        others = range(start + tried, min(stop, start + MAX_ROW_STEPS))
        kernels.add_expected(rows for step in others for rows in _row_counts(noised_at(step)))
        if start in batches:
            size = batches[start]
            filled = BatchSize(size.global_batch_size, size.global_batch_size // world_size, GPU_BUDGET)
            sized = min(SIZED_STEPS, stop - start)
            micro_batches[start], advised[start] = (
                np.concatenate(
                    [
                        loader.micro_batch_tokens(samples + step * each.global_batch_size, each).flatten()
                        for step in range(sized)
                    ]
                )
                for each in (size, filled)
            )
        # The position of the next stage in the sample order.
        samples += loader.batch_at(start).global_batch_size * (stop - start)
    return Estimate(
        parameters=count_parameters(model),
        trained_shapes=[tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad],
        tokens_per_step=store.split("train").mean_length * samples / steps,
        flops_per_step=flops,
        batches=batches,
        world_size=world_size,
        activations_mib=sum(tracker.costs.peak("activations").values()) / MIB,
        peak_mib={kind: size / MIB for kind, size in tracker.costs.peak().items()},
        attention=attention,
        optimizer=name,
        one_moment=one_moment,
        ema=config.ema.decay > 0,
        kernels_mib=kernels.mib(tracker.costs.products),
        micro_batches=micro_batches,
        advised=advised,
    )


def _noised(
    config: RunConfig, loader: Loader, objective: Objective, stage: tuple[int, int], step: int
) -> list[NoisedBatch]:
    """Return rank 0's noised micro-batches of `step`; `stage` is (first step, position of its first sample)."""
    start, position = stage
    samples = loader.batch_at(step).global_batch_size
    ((_, micro_batches),) = loader.steps(step, step + 1, position + (step - start) * samples)
    return corrupt_step(config, objective, step, samples, micro_batches)


def _row_counts(noised: list[NoisedBatch]) -> list[int]:
    """Return the numbers of tokens and of predicted tokens of the micro-batches."""
    return [len(rows) for batch in noised for rows in (batch.noised_tokens, batch.positions)]


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


def print_estimate(config: RunConfig, accelerate_file: str | None = None) -> None:
    """Print the resolved config and the estimate to stdout, for the processes that the launcher started."""
    world_size, replicas, mixed_precision = read_launcher_sizes(os.environ, accelerate_file)
    config = resolve_precision(config, mixed_precision)
    store = drop_bad_samples(open_data(config.data.location), "train", config.data.max_bad_samples)
    with Progress() as progress:
        progress.phase("estimating the costs", announce=False)
        costs = estimate(config, store, world_size)
    print(to_yaml(config))
    print("parameters           " + ", ".join(f"{name} {count:,}" for name, count in costs.parameters.items()))
    print(f"total parameters     {sum(costs.parameters.values()):,}, {costs.trainable:,} trained")
    for step, size in costs.batches.items():
        print(
            f"{f'  from step {step}' if step else 'global batch':<20} {size.global_batch_size} samples = "
            f"{costs.world_size} processes x "
            + (
                f"micro-batches of {size.micro_batch}"
                if size.micro_batch_tokens
                else f"{size.micro_batch} x {size.accumulation(costs.world_size)} micro-batches"
            )
        )
        for line in micro_batch_lines(costs, step):
            print(line)
    for notice in batch_notices(config, store, world_size):
        print(f"  notice             {notice}")
    print(f"tokens per step      {costs.tokens_per_step:,.0f} on average, no padding")
    print(
        f"FLOPs per step       {costs.flops_per_step / 1e9:,.1f} G (matrix products: forward, recomputation, backward)"
    )
    print(f"attention            {costs.attention}")
    print(f"optimizer            {costs.optimizer}")
    rate = describe_lr(config.train.steps, config.optim, config.schedule, costs.batches[0].global_batch_size)
    print(f"learning rate        {rate}, of {config.train.steps} steps")
    parts = (f"{size:,.0f} {KIND_LABELS[kind]}" for kind, size in costs.peak_mib.items() if size >= 0.5)
    print(f"memory per process   {costs.total_mib:,.0f} MiB = {' + '.join(parts)}")
    print(f"  on the host        {costs.checkpoint_mib:,.0f} MiB more from the first checkpoint on, for staging copies")
    if costs.kernels_mib >= 0.5:
        print(f"  kernels            {costs.kernels_mib:,.0f} MiB more for half-precision kernels of oneDNN")
    if costs.world_size > 1:
        state = "weights, EMA, gradients and moments" if costs.ema else "weights, gradients and moments"
        print(f"  {state} by engine, MiB on each of {costs.world_size} devices, and on the host")
        if replicas > 1:
            print(f"  {FSDP2} with {replicas} replicas x {costs.world_size // replicas} shards")
        for engine in ENGINES:
            if not all(supports(setting, engine) for setting in requested_features(config)):
                continue
            device, host = state_mib(engine, costs, config.precision, replicas)
            print(f"    {engine:<15} {device:>12,.0f} {host:>12,.0f}")


def micro_batch_lines(costs: Estimate, start: int) -> list[str]:
    """Return lines about the micro-batches of the stage from step `start` on; none for one beyond the run's end."""
    if start not in costs.micro_batches:
        return []
    tokens, filled = costs.micro_batches[start], costs.advised[start]
    lines = [
        f"  a micro-batch      {tokens.mean():,.0f} text and latent tokens on average, {np.quantile(tokens, 0.1):,.0f} "
        "or fewer in a tenth of them"
    ]
    if tokens.mean() < GPU_TOKENS and len(filled) < len(tokens):
        lines.append(
            f"  on a GPU           train.micro_batch_tokens={GPU_BUDGET} makes it {filled.mean():,.0f}, if memory "
            f"suffices: below some {GPU_TOKENS:,} a GPU waits for the host"
        )
    return lines


def state_mib(engine: str, costs: Estimate, precision: str, replicas: int = 1) -> tuple[float, float]:
    """Return MiB of weights, EMA, gradients, master weights and moments per process, on (a device, the host).

    Excludes communication buckets, and the blocks that FSDP2 and ZeRO-3 gather temporarily. `replicas` are FSDP2's.
    """
    sharding = Sharding(engine, precision, costs.world_size, replicas if engine == FSDP2 else 1)
    share, (device, host) = sharding.share, state_bytes(sharding)
    frozen = sum(costs.parameters.values()) - costs.trainable
    weights_share = share if engine in WEIGHT_SHARDING_ENGINES else 1
    width = sharding.weight_bytes if engine in ZERO_ENGINES else BYTES_PER_FROZEN
    frozen_bytes = frozen * width * weights_share
    ema = BYTES_PER_EMA * (1 if engine == "ddp" else share) if costs.ema else 0.0  # partitioned like the master weights
    if engine in OFFLOAD_ENGINES:
        host += ema
    else:
        device += ema
    trained = padded_parameters(sharding, costs.trained_shapes)
    saved_bytes = costs.one_moment * BYTES_PER_MOMENT * weights_share  # Muon's, which no engine offloads
    on_host = engine == "zero3_offload"
    return (
        (trained * device - saved_bytes + (0 if on_host else frozen_bytes)) / MIB,
        (trained * host + (frozen_bytes if on_host else 0)) / MIB,
    )
