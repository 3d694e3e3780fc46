"""Micro-batches that fit into memory: sizes beyond the largest so far are tried first, and halved if they do not fit.

A rank that runs out of memory within a step would leave the others waiting in a collective. So before a step, each rank
whose largest micro-batch exceeds all previous ones tries it locally, and then all ranks agree. The sample order tells
which ranks do so, so that a step without new sizes costs no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import TrainState
from mmldlm.data.batch_schedule import BatchSize, TrainConfig
from mmldlm.data.loader import Loader
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.errors import ConfigError


def halve_micro_batch(size: BatchSize, world_size: int) -> int:
    """Return the largest micro-batch up to half of `size` that divides a rank's samples; 0 if there is none."""
    half = size.micro_batch_size // 2
    return cap_micro_batch(size, half, world_size).micro_batch_size if half else 0


def cap_micro_batch(size: BatchSize, limit: int, world_size: int) -> BatchSize:
    """Return `size` with the largest micro-batch up to `limit` that divides a rank's samples."""
    samples = size.global_batch_size // world_size
    largest = min(limit, size.micro_batch_size)
    return BatchSize(size.global_batch_size, next(micro for micro in range(largest, 0, -1) if samples % micro == 0))


class AutoMicroBatch:
    """Batch sizes of a run, with micro-batches that are known to fit into memory."""

    def __init__(self, config: TrainConfig, state: TrainState, objective: Objective, engine: Engine, loader: Loader):
        """Make `loader` use the batch sizes of this object."""
        self.config, self.state, self.objective, self.engine, self.loader = config, state, objective, engine, loader
        # int64 [world_size]: tokens of the largest micro-batch that fitted on each rank, without and with gradients
        # of earlier micro-batches in memory.
        self._proven = {with_grads: np.zeros(engine.world_size, np.int64) for with_grads in (False, True)}
        loader.batch_at = self.batch_at

    def batch_at(self, step: int) -> BatchSize:
        """Return the batch sizes of optimizer step `step` under the present limit."""
        size, limit = self.config.batch_at(step, self.engine.world_size), self.state.micro_batch_limit
        return size if limit is None else cap_micro_batch(size, limit, self.engine.world_size)

    def shrink(self, step: int, micro_batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Lower the micro-batch size if this step's micro-batches do not fit on some rank (collective).

        Returns:
            None if they fit; otherwise the values to log, and `batch_at` returns smaller micro-batches from here on.

        Raises:
            ConfigError: A single sample does not fit.
        """
        engine, size = self.engine, self.batch_at(step)
        tokens = self.loader.tokens(self.state.samples_drawn, size)
        assert [batch.layout.num_tokens for batch in micro_batches] == tokens[engine.rank].tolist()
        # Memory grows with the number of tokens and latent tokens.
        sizes = tokens.max(axis=1) + size.micro_batch_size * micro_batches[0].layout.latent_tokens
        accumulating = len(micro_batches) > 1
        new = sizes > self._proven[accumulating]
        # The same on every rank, which computes the sizes of all: they all return here or none does.
        if not new.any():
            return None
        largest = max(micro_batches, key=lambda batch: batch.layout.num_tokens)
        fits = not new[engine.rank] or self._try_in_memory(largest, accumulating)
        # The first step allocates the optimizer's state: a size that fits before it may not fit after it.
        has_state = bool(engine.unwrapped_optimizer.state)
        results = np.array(engine.gather((fits, has_state), "gather of what fits into memory"))
        # What fits next to gradients also fits without them.
        for with_grads in {False, accumulating}:
            np.maximum(self._proven[with_grads], sizes, out=self._proven[with_grads], where=results.all(axis=1))
        if results[:, 0].all():
            return None
        rank = int(results[:, 0].argmin())
        longest = int(tokens[rank].max())
        smaller = halve_micro_batch(size, engine.world_size)
        if not smaller:
            raise ConfigError(
                f"train.micro_batch_size: 1 is the minimum, and a sample of {longest} tokens does not fit into the "
                f"memory of rank {rank}; try memory.activation_checkpointing=full, precision=bf16, shorter samples, "
                "or an engine that shards weights (fsdp2, zero3; without train.auto_micro_batch)"
            )
        self.state.micro_batch_limit = smaller
        return {"micro_batch_size": smaller, "before": size.micro_batch_size, "rank": rank, "tokens": longest}

    def _try_in_memory(self, batch: Batch, accumulating: bool) -> bool:
        """Return whether forward and backward of `batch` fit into the memory of this rank."""

        def loss_of(network: Any) -> torch.Tensor:
            noised = all_masked(self.objective, batch).to(self.engine.device)
            return self.objective(network, noised, noised.counts.tolist())[0]

        engine = self.engine
        return fits_in_memory(engine.unwrapped_model, loss_of, engine.device, accumulating, engine.comm_buffer_bytes)


def all_masked(objective: Objective, batch: Batch) -> NoisedBatch:
    """Return `batch` with all tokens masked, for which the network needs the most memory."""
    ones = torch.ones(len(batch.lengths))
    mode = torch.full_like(ones, MODES.index("joint"), dtype=torch.int64)
    noise = Noise(mode, ones, ones, torch.zeros(batch.layout.num_tokens), torch.zeros_like(batch.latents), ones)
    return objective.corrupt(batch, noise)
