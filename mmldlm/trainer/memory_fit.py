"""`fit_micro_batches`: before the first step, micro-batches are halved until the largest ones of the run fit in memory.

A rank whose weights are replicated tries a forward and backward pass, which it can do alone. Under an engine that
shards weights, the forward pass gathers them from all ranks, so there an estimate decides, see `engine_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader, fixed_batches
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.diffusion.objective import Network, NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.launch import FSDP2
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.errors import ConfigError
from mmldlm.model.ops import assume_device
from mmldlm.run.factory import build_fake_model
from mmldlm.telemetry.resources import free_memory_mib
from mmldlm.trainer.engine_memory import FLOAT32, MIB, USABLE_SHARE, Sharding, StepMemory, rank_memory
from mmldlm.trainer.memory_tracker import StepTracker
from mmldlm.trainer.setup import Components
from mmldlm.utils.progress import Progress


class Fit(NamedTuple):
    """The answer of a rank whether it has the memory for a micro-batch, with the figures of an estimate."""

    fits: bool
    needed_mib: int = 0
    usable_mib: int = 0

    def __str__(self) -> str:
        return f"{self.needed_mib:,} of {self.usable_mib:,} MiB by the estimate"


def fit_micro_batches(
    config: RunConfig, components: Components, engine: Engine, state: TrainState
) -> tuple[RunConfig, list[dict[str, Any]], list[str]]:
    """Fit the micro-batches of the steps after `state` into the memory of all ranks (collective).

    Return the config with the batch sizes that fit, the values to log of each change, and lines for the user. A single
    sample that does not fit is a `ConfigError`.
    """
    train, loader = config.train, components.loader
    stages, position = train.batch_stages(engine.world_size), state.samples_drawn
    changes: list[dict[str, Any]] = []
    lines: list[str] = []
    later = [start for start in stages if state.step < start < train.steps]
    for start, stop in pairwise([state.step, *later, train.steps]):
        stage = max(first for first in stages if first <= start)
        while True:
            size = stages[stage]
            largest = _largest_step(loader, engine, size, range(start, stop), position)
            place = position + (largest - start) * size.global_batch_size
            totals = loader.micro_batch_tokens(place, size)
            owner, index = np.unravel_index(totals.argmax(), totals.shape)
            with engine.raise_on_all_ranks("reading of the largest micro-batch"):
                micro_batches = loader.read(place, size, int(owner))
            lengths = micro_batches[index].lengths
            fit = _assess(config, components, engine, micro_batches, int(index), size)
            fits = [Fit(*values) for values in engine.gather(fit, "gather of what fits into memory")]
            rank, worst = min(enumerate(fits), key=lambda item: (item[1].fits, item[1].usable_mib))
            if worst.fits:
                break
            if len(lengths) == 1:
                figures = f" ({worst})" if worst.needed_mib else ""
                raise ConfigError(
                    f"train.auto_micro_batch: a micro-batch of one sample, of {lengths[0]} tokens, does not fit into "
                    f"the memory of rank {rank}{figures}; try memory.activation_checkpointing=full, precision=bf16, "
                    "shorter samples, or an engine that shards weights (fsdp2, zero3) or offloads them (zero3_offload)"
                )
            stages[stage] = _halve(size, engine.world_size, int(totals.max()))
            key = "micro_batch_tokens" if size.micro_batch_tokens else "micro_batch_size"
            estimate = {"needed_mib": worst.needed_mib, "usable_mib": worst.usable_mib} if worst.needed_mib else {}
            values = {key: getattr(stages[stage], key), "before": getattr(size, key), "rank": rank, "from_step": start}
            changes.append({**values, "tokens": sum(lengths), **estimate})
        lines.append(f"micro-batches of {size.micro_batch} from step {start} on fit into memory")
        lines[-1] += f": rank {rank} has the least, {worst}" if worst.needed_mib else ""
        position += (stop - start) * size.global_batch_size
    if changes:
        schedule: Any = {start: asdict(size) for start, size in stages.items()}
        config = replace(config, train=replace(train, batch_schedule=schedule))
    return config, changes, lines


def _largest_step(loader: Loader, engine: Engine, size: BatchSize, steps: range, position: int) -> int:
    """Return the step with the largest micro-batch; each rank searches its part of the steps (collective)."""
    share = -(-len(steps) // engine.world_size)
    part = steps[engine.rank * share :][:share]
    first = position + (part.start - steps.start) * size.global_batch_size
    largest = loader.largest_step(part, first, size) if part else None
    found = [found for found in engine.gather(largest, "search for the largest micro-batch") if found]
    return max(found, key=lambda item: item[0])[1]


def _halve(size: BatchSize, world_size: int, tokens: int) -> BatchSize:
    """Return the next smaller size, of half as many samples or tokens; `tokens` did not fit."""
    if size.micro_batch_tokens:
        return replace(size, micro_batch_tokens=tokens // 2)
    samples = size.global_batch_size // world_size
    divisors = (micro for micro in range(size.micro_batch_size // 2, 0, -1) if samples % micro == 0)
    return replace(size, micro_batch_size=next(divisors))


def _assess(
    config: RunConfig, components: Components, engine: Engine, batches: Sequence[Batch], index: int, size: BatchSize
) -> Fit:
    """Return whether micro-batch `index` of a step fits, beside the gradients of others if there are any."""
    objective, sizes = components.objective, components.corruption.sizes
    accumulates = engine.sums_after_backward or size.accumulation(engine.world_size) > 1
    if engine.shards_parameters:
        needed = _needed_mib(config, components, engine, all_masked(objective, batches[index]), accumulates)
        usable = USABLE_SHARE * free_memory_mib(engine.device, engine.launch.local_world_size)
        return Fit(needed <= usable, round(needed), round(usable))

    def loss_of(network: Network) -> Tensor:
        # All of a step are on the device together, see `Trainer.accumulate`.
        noised = [all_masked(objective, batch) for batch in batches]
        noised = noised if sizes is None else sizes.fill(noised, size.micro_batch_tokens)
        noised = [batch.to(engine.device) for batch in noised]
        return objective(network, noised[index], noised[index].counts.tolist())[0]

    optimizer, buffers = engine.unwrapped_optimizer, engine.comm_buffer_bytes
    return Fit(fits_in_memory(engine.unwrapped_model, optimizer, loss_of, engine.device, accumulates, buffers))


def _needed_mib(
    config: RunConfig, components: Components, engine: Any, noised: NoisedBatch, accumulates: bool
) -> float:
    """Return what a step with this micro-batch takes beside what is there before the first one."""
    tracker = StepTracker(build_fake_model(config, components.store.manifest), components.objective)
    if accumulates:
        tracker.allocate_gradients()
    with assume_device(engine.device.type):
        tracker.micro_batches([noised])
    step = StepMemory.of(tracker, accumulates)
    sharding, absent = Sharding(engine.name, config.precision, engine.world_size, engine.launch.replicas), 0.0
    if engine.name == FSDP2:
        sharding = replace(sharding, reshards=engine.accelerator.state.fsdp_plugin.reshard_after_forward)
        # Of the state, gradients and in a new run both moments are allocated by the first step.
        absent = FLOAT32 * (1 if engine.unwrapped_optimizer.state else 3) * step.trained / sharding.shards / MIB
    else:
        sharding = replace(
            sharding,
            bucket=engine.model.zero_reduce_bucket_size(),
            max_gathered=engine.model.zero_max_live_parameters() + engine.model.zero_prefetch_bucket_size(),
            secondary_partition=engine.launch.secondary_partition,
        )
    memory = rank_memory(step, sharding)
    return memory.peak - memory.state + absent


def all_masked(objective: Objective, batch: Batch) -> NoisedBatch:
    """Return `batch` with all tokens masked, for which the network needs the most memory."""
    ones = torch.ones(len(batch.lengths))
    mode = torch.full_like(ones, MODES.index("joint"), dtype=torch.int64)
    noise = Noise(mode, ones, ones, torch.zeros(batch.layout.num_tokens), torch.zeros_like(batch.latents), ones)
    return objective.corrupt(batch, noise)


def fit_run(
    config: RunConfig, components: Components, engine: Engine, state: TrainState
) -> tuple[RunConfig, Components, list[dict[str, Any]], list[str]]:
    """Fit the micro-batches if `train.auto_micro_batch` is set; return what results, as `fit_micro_batches` does."""
    if not config.train.auto_micro_batch or state.step >= config.train.steps:
        return config, components, [], []
    with Progress(engine.is_main) as progress:
        progress.phase("fitting the micro-batches into memory", announce=False)
        config, changes, lines = fit_micro_batches(config, components, engine, state)
    return config, components.for_data(config, engine, components.store), changes, lines


def warm_up(engine: Engine, components: Components) -> None:
    """Run forward and backward of a sample if the engine needs it, see `Engine.warm_up` (collective)."""
    objective = components.objective

    def loss_of(network: Network) -> Tensor:
        sample = next(fixed_batches(components.store.split("train"), [0], micro_batch_size=1))
        batch = all_masked(objective, sample).to(engine.device)
        return objective(network, batch, batch.counts.tolist())[0]

    engine.warm_up(loss_of)
