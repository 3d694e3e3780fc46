"""Try the largest micro-batch before the first step. `train.auto_micro_batch` halves micro-batches until they fit.

Every rank tries a forward and backward pass on its own. That is impossible if the engine shards weights, because a
forward pass then gathers them from all ranks: under such an engine, the first step is the trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.batch import Batch, BatchSize
from mmldlm.checkpoint.state import TrainState
from mmldlm.data.loader import Loader, fixed_batches
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.diffusion.objective import Network, NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.errors import ConfigError
from mmldlm.trainer.memory import MAX_SEARCHED_STEPS
from mmldlm.trainer.setup import Components
from mmldlm.utils.progress import Progress


def fit_run(components: Components, state: TrainState) -> tuple[Components, list[dict[str, Any]], list[str]]:
    """Try the largest micro-batch of the steps after `state` on all ranks (collective).

    Return components with sizes that fit, a record of each change, and lines for the user. A micro-batch that does not
    fit is a `ConfigError`. With `train.auto_micro_batch`, that can only be a single sample.
    """
    train, engine, loader = components.config.train, components.engine, components.loader
    # On a CPU, only on request: Linux grants any memory and kills a process that uses too much.
    tries = train.auto_micro_batch or engine.device.type == "cuda"
    if not tries or engine.shards_parameters or state.step >= train.steps:
        return components, [], []
    stages, position = train.batch_stages(engine.world_size), state.samples_drawn
    changes, lines = list[dict[str, Any]](), list[str]()
    later = [start for start in stages if state.step < start < train.steps]
    with Progress(engine.is_main) as progress:
        progress.phase("trying the largest micro-batch", announce=False)
        for start, stop in pairwise([state.step, *later, train.steps]):
            stage = max(first for first in stages if first <= start)
            while True:
                size = stages[stage]
                searched = range(start, stop if train.auto_micro_batch else min(stop, start + MAX_SEARCHED_STEPS))
                step = _largest_step(loader, engine, size, searched, position)
                place = position + (step - start) * size.global_batch_size
                totals = loader.micro_batch_tokens(place, size)
                owner, index = np.unravel_index(totals.argmax(), totals.shape)
                with engine.raise_on_all_ranks("reading of the largest micro-batch"):
                    micro_batches = loader.read(place, size, int(owner))
                fits = engine.gather(
                    _fits(components, micro_batches, int(index), size), "gather of what fits into memory"
                )
                if all(fits):
                    break
                lengths, rank = micro_batches[index].lengths, fits.index(False)
                key = "micro_batch_tokens" if size.micro_batch_tokens else "micro_batch_size"
                if not train.auto_micro_batch or len(lengths) == 1:
                    raise _too_large(key, lengths, rank)
                stages[stage] = _halve(size, engine.world_size, int(totals.max()))
                sizes = {key: getattr(stages[stage], key), "before": getattr(size, key)}
                changes.append({**sizes, "rank": rank, "from_step": start, "tokens": sum(lengths)})
            lines.append(f"micro-batches of {size.micro_batch} from step {start} on fit into memory")
            position += (stop - start) * size.global_batch_size
    if changes:
        schedule: Any = {start: asdict(size) for start, size in stages.items()}
        config = replace(components.config, train=replace(train, batch_schedule=schedule))
        components = components.for_data(config, components.store)
    return components, changes, lines


def _too_large(key: str, lengths: Sequence[int], rank: int) -> ConfigError:
    """Return the error for a micro-batch that does not fit."""
    smaller = "lower it or set train.auto_micro_batch=true (the curve stays), or "
    return ConfigError(
        f"train.{key}: the largest micro-batch, {len(lengths)} samples with {sum(lengths):,} tokens, does not fit into "
        f"the memory of rank {rank}; {smaller * (len(lengths) > 1)}try memory.activation_checkpointing=full, "
        "precision=bf16, shorter samples, or an engine that shards weights (fsdp2, zero3) or offloads them "
        "(zero3_offload)"
    )


def _largest_step(loader: Loader, engine: Engine, size: BatchSize, steps: range, position: int) -> int:
    """Return the step with the largest micro-batch. Each rank searches a part of the steps (collective)."""
    share = -(-len(steps) // engine.world_size)
    part = steps[engine.rank * share :][:share]
    first = position + (part.start - steps.start) * size.global_batch_size
    largest = loader.largest_step(part, first, size) if part else None
    found = [found for found in engine.gather(largest, "search for the largest micro-batch") if found]
    return max(found, key=lambda item: item[0])[1]


def _halve(size: BatchSize, world_size: int, tokens: int) -> BatchSize:
    """Return the next smaller size, with half as many samples or tokens, after `tokens` tokens did not fit."""
    if size.micro_batch_tokens:
        return replace(size, micro_batch_tokens=tokens // 2)
    samples = size.global_batch_size // world_size
    divisors = (micro for micro in range(size.micro_batch_size // 2, 0, -1) if samples % micro == 0)
    return replace(size, micro_batch_size=next(divisors))


def _fits(components: Components, batches: Sequence[Batch], index: int, size: BatchSize) -> bool:
    """Return whether micro-batch `index` of a step fits on this rank, beside the gradients of other micro-batches."""
    engine, objective, sizes = components.engine, components.objective, components.corruption.sizes

    def loss_of(network: Network) -> Tensor:
        # All micro-batches of a step are on the device together, see `Trainer.accumulate`.
        noised = [all_masked(objective, batch) for batch in batches]
        noised = noised if sizes is None else sizes.fill(noised, size.micro_batch_tokens)
        noised = [batch.to(engine.device) for batch in noised]
        return objective(network, noised[index], noised[index].counts.tolist())[0]

    accumulates = engine.sums_after_backward or size.accumulation(engine.world_size) > 1
    optimizer, buffers = engine.unwrapped_optimizer, engine.comm_buffer_bytes
    return fits_in_memory(engine.unwrapped_model, optimizer, loss_of, engine.device, accumulates, buffers)


def all_masked(objective: Objective, batch: Batch) -> NoisedBatch:
    """Return `batch` with every token masked, which takes the most memory."""
    ones = torch.ones(len(batch.lengths))
    mode = torch.full_like(ones, MODES.index("joint"), dtype=torch.int64)
    noise = Noise(mode, ones, ones, torch.zeros(batch.layout.num_tokens), torch.zeros_like(batch.latents), ones)
    return objective.corrupt(batch, noise)


def warm_up(components: Components) -> None:
    """Run one sample forward and backward if the engine needs a warm-up, see `Engine.warm_up` (collective)."""
    engine, objective = components.engine, components.objective

    def loss_of(network: Network) -> Tensor:
        sample = next(fixed_batches(components.store.split("train"), [0], micro_batch_size=1))
        batch = all_masked(objective, sample).to(engine.device)
        return objective(network, batch, batch.counts.tolist())[0]

    engine.warm_up(loss_of)
