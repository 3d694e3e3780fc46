"""Micro-batches that fit into memory: larger ones than any before are tried out first, and halved where they do not.

A rank that runs out of memory within a step would leave the others waiting in a collective. So nothing new is done
within a step: before it, each rank whose micro-batches are larger than any before rehearses the largest, alone, and
then all agree. Which ranks those are follows from the order of samples, so a step with nothing new costs no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.checkpoint import TrainState
from mmldlm.data.batch_schedule import BatchSize, TrainConfig
from mmldlm.data.loader import Loader
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.errors import ConfigError


def check_auto_micro_batch(config: TrainConfig, engine: str) -> None:
    """`ConfigError` where a forward pass is collective, so that no rank can try one out alone."""
    if config.auto_micro_batch and engine.startswith(("fsdp", "zero3")):
        raise ConfigError(
            f"train.auto_micro_batch: expected false under {engine}, whose ranks gather weights within each forward "
            "pass, found true; it works under one process, ddp, zero1 and zero2"
        )


def halved(size: BatchSize, world_size: int) -> int:
    """The largest micro-batch at most half as large that a rank's samples can be shared into; 0 below 1."""
    return capped(size, size.micro_batch_size // 2, world_size).micro_batch_size if size.micro_batch_size > 1 else 0


def capped(size: BatchSize, limit: int, world_size: int) -> BatchSize:
    """`size` with the largest micro-batch up to `limit` that a rank's samples can be shared into."""
    samples = size.global_batch_size // world_size
    up_to = min(limit, size.micro_batch_size)
    return BatchSize(size.global_batch_size, next(micro for micro in range(up_to, 0, -1) if samples % micro == 0))


class AutoMicroBatch:
    """The sizes of a run whose micro-batches are known to fit."""

    def __init__(self, config: TrainConfig, state: TrainState, objective: Objective, runtime: Engine, loader: Loader):
        """Has `loader` ask here from now on."""
        self.config, self.state, self.objective, self.runtime, self.loader = config, state, objective, runtime, loader
        # int64 [world_size]: places of the largest that fitted on each rank, alone and with gradients beside it.
        self._proven = {beside: np.zeros(runtime.world_size, np.int64) for beside in (False, True)}
        loader.batch_at = self.batch_at

    def batch_at(self, step: int) -> BatchSize:
        """The sizes of optimizer step `step`, as far as is known now."""
        size, limit = self.config.batch_at(step, self.runtime.world_size), self.state.micro_batch_limit
        return size if limit is None else capped(size, limit, self.runtime.world_size)

    def shrink(self, step: int, micro_batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Collective: None where this step's micro-batches fit on all ranks.

        Else what to tell, and `batch_at` is smaller from here on. ConfigError where a single sample does not fit.
        """
        runtime, size = self.runtime, self.batch_at(step)
        tokens = self.loader.tokens(self.state.samples_drawn, size)
        assert [batch.layout.num_tokens for batch in micro_batches] == tokens[runtime.rank].tolist()
        # Tokens and latent tokens: what the network's memory grows with.
        places = tokens.max(axis=1) + size.micro_batch_size * micro_batches[0].layout.latent_tokens
        accumulating = len(micro_batches) > 1
        new = places > self._proven[accumulating]
        if not new.any():
            return None
        largest = max(micro_batches, key=lambda batch: batch.layout.num_tokens)
        fits = not new[runtime.rank] or self._rehearse(largest, accumulating)
        # The optimizer's state comes with the first step: what fits before it may not fit beside it.
        settled = bool(runtime.unwrapped_optimizer.state)
        verdicts = np.array(runtime.gather((fits, settled), "gather of what fits into memory"))
        for beside in {False, accumulating}:
            np.maximum(self._proven[beside], places, out=self._proven[beside], where=verdicts.all(axis=1))
        if verdicts[:, 0].all():
            return None
        rank = int(verdicts[:, 0].argmin())
        longest = int(tokens[rank].max())
        smaller = halved(size, runtime.world_size)
        if not smaller:
            raise ConfigError(
                f"train.micro_batch_size: 1 is the least, and a sample of {longest} tokens does not fit into the "
                f"memory of rank {rank}; try memory.activation_checkpointing=full, precision=bf16, shorter samples, "
                "or an engine that shares out weights (fsdp2, zero3; without train.auto_micro_batch)"
            )
        self.state.micro_batch_limit = smaller
        return {"micro_batch_size": smaller, "before": size.micro_batch_size, "rank": rank, "tokens": longest}

    def _rehearse(self, batch: Batch, accumulating: bool) -> bool:
        def loss_of(network: Any) -> torch.Tensor:
            noised = _all_masked(self.objective, batch).to(self.runtime.device)
            return self.objective(network, noised, noised.counts.tolist())[0]

        runtime = self.runtime
        return fits_in_memory(runtime.unwrapped_model, loss_of, runtime.device, accumulating, runtime.exchange_bytes)


def _all_masked(objective: Objective, batch: Batch) -> NoisedBatch:
    """The most that noise can make of it: all tokens are to be predicted."""
    ones = torch.ones(len(batch.lengths))
    mode = torch.full_like(ones, MODES.index("joint"), dtype=torch.int64)
    noise = Noise(mode, ones, ones, torch.zeros(batch.layout.num_tokens), torch.zeros_like(batch.latents), ones)
    return objective.corrupt(batch, noise)
