"""Micro-batches that fit into memory: sizes beyond the largest so far are assessed, and lowered if they do not fit.

A rank that runs out of memory within a step would leave the others waiting in a collective. So before a step, each rank
whose largest micro-batch exceeds all previous ones tries it locally, and then all ranks agree. The sample order tells
which ranks do so, so that a step without new sizes costs no exchange.

Under an engine that shards weights no rank can try one alone. There the ranks plan before the first step, by an
estimate for the largest micro-batch to come, see `memory_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import TrainState
from mmldlm.config import RunConfig
from mmldlm.data.batch_schedule import BatchSize
from mmldlm.data.loader import Loader
from mmldlm.data.manifest import Manifest
from mmldlm.diffusion.noise import MODES, Noise
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.distributed.engine import Engine
from mmldlm.distributed.memory_probe import fits_in_memory
from mmldlm.errors import ConfigError
from mmldlm.trainer.memory_plan import MemoryPlan


def halve_micro_batch(size: BatchSize, world_size: int) -> int:
    """Return the largest micro-batch up to half of `size` that divides a rank's samples; 0 if there is none."""
    half = size.micro_batch_size // 2
    return cap_micro_batch(size, half, world_size).micro_batch_size if half else 0


def cap_micro_batch(size: BatchSize, limit: int, world_size: int) -> BatchSize:
    """Return `size` with the largest micro-batch up to `limit` that divides a rank's samples."""
    samples = size.global_batch_size // world_size
    largest = min(limit, size.micro_batch_size)
    return BatchSize(size.global_batch_size, next(micro for micro in range(largest, 0, -1) if samples % micro == 0))


class _Largest(NamedTuple):
    """The largest micro-batch of each rank in a step, int64 [world_size] each."""

    samples: np.ndarray
    tokens: np.ndarray  # of their texts
    sizes: np.ndarray  # text and latent tokens, with whose number memory grows


class _Fit(NamedTuple):
    """Result of a trial or an estimate of a micro-batch on a rank."""

    fits: bool  # into the memory
    holds: bool = True  # also for later steps
    needed_mib: int = 0  # of an estimate
    usable_mib: int = 0


class AutoMicroBatch:
    """Batch sizes of a run, with micro-batches that are known to fit into memory.

    Args:
        config: Config of the run, with its precision resolved.
        manifest: Manifest of the run's data.
        state: State of the run, which has the limit of the micro-batches.
        objective: Objective of the run.
        engine: Engine that has wrapped the model.
        loader: Loader, which is made to use the batch sizes of this object.
    """

    def __init__(
        self,
        config: RunConfig,
        manifest: Manifest,
        state: TrainState,
        objective: Objective,
        engine: Engine,
        loader: Loader,
    ):
        self.config, self.manifest, self.state = config, manifest, state
        self.objective, self.engine, self.loader = objective, engine, loader
        # int64 [world_size]: tokens of the largest micro-batch that fitted on each rank, without and with gradients
        # of earlier micro-batches in memory.
        self._proven = {with_grads: np.zeros(engine.world_size, np.int64) for with_grads in (False, True)}
        loader.batch_at = self.batch_at

    @cached_property
    def _memory_plan(self) -> MemoryPlan:
        return MemoryPlan(self.config, self.manifest, self.objective, self.engine)

    def batch_at(self, step: int) -> BatchSize:
        """Return the batch sizes of optimizer step `step` under the present limit."""
        size, world_size = self.config.train.batch_at(step, self.engine.world_size), self.engine.world_size
        if size.micro_batch_tokens:
            budget = min(size.micro_batch_tokens, self.state.micro_batch_token_limit or size.micro_batch_tokens)
            return replace(size, micro_batch_tokens=budget)
        limit = self.state.micro_batch_limit
        return size if limit is None else cap_micro_batch(size, limit, world_size)

    def plan(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Lower the micro-batch size to what fits by the estimates for all remaining steps (collective).

        Returns:
            The values to log of each change, and what is planned, for the user. Nothing under engines whose ranks try
            their micro-batches.

        Raises:
            ConfigError: A single sample does not fit.
        """
        train, first = self.config.train, self.state.step
        changes: list[dict[str, Any]] = []
        notes: list[str] = []
        starts = {first, *train.batch_schedule} if self.engine.shards_parameters else ()
        position = self.state.samples_drawn
        for start, stop in pairwise([*sorted(start for start in starts if first <= start < train.steps), train.steps]):
            change, results = None, None
            while results is None or change is not None:
                size = self.batch_at(start)
                step = self.loader.largest_step((start, stop), position)
                by_rank = self._largest(position + (step - start) * size.global_batch_size, size)
                # All ranks plan for the largest of all, since in a verified step they compute those of one another.
                samples, tokens, total = (values[by_rank.sizes.argmax()] for values in by_rank)
                if samples > 1 and total * 2 > size.micro_batch_tokens > total:
                    # Another epoch may fill the budget, which bounds all steps.
                    samples, tokens = (value * size.micro_batch_tokens // total for value in (samples, tokens))
                    total = size.micro_batch_tokens
                largest = _Largest(*(np.full_like(by_rank.sizes, value) for value in (samples, tokens, total)))
                results = self._assess(largest, size.accumulation(self.engine.world_size) > 1)
                change = self._lower(size, largest, results)
                changes += [] if change is None else [change]
            if results:
                rank, tightest = min(enumerate(results), key=lambda item: item[1].usable_mib)
                notes.append(
                    f"micro-batches of {size.micro_batch} from step {start} on: by an estimate, a step takes "
                    f"{tightest.needed_mib:,} MiB of {tightest.usable_mib:,} MiB that rank {rank} may use"
                )
            position += (stop - start) * size.global_batch_size
        return changes, notes

    def shrink(self, step: int, micro_batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Lower the micro-batch size if this step's micro-batches do not fit on some rank (collective).

        Returns:
            None if they fit; otherwise the values to log, and `batch_at` returns smaller micro-batches from here on.

        Raises:
            ConfigError: A single sample does not fit.
        """
        size = self.batch_at(step)
        largest = self._largest(self.state.samples_drawn, size)
        assert max(map(self._size_of, micro_batches)) == largest.sizes[self.engine.rank]
        return self._lower(size, largest, self._assess(largest, len(micro_batches) > 1, micro_batches))

    def _largest(self, position: int, size: BatchSize) -> _Largest:
        """Return the largest micro-batches of the step that begins at `position`."""
        samples, tokens = self.loader.micro_batch_sizes(position, size)
        sizes = tokens + samples * self.manifest.latent.tokens
        largest, ranks = sizes.argmax(axis=1), np.arange(len(sizes))
        return _Largest(samples[largest], tokens[ranks, largest], sizes[ranks, largest])

    def _size_of(self, batch: Batch) -> int:
        return batch.layout.num_tokens + batch.layout.num_samples * self.manifest.latent.tokens

    def _assess(self, largest: _Largest, accumulating: bool, micro_batches: Sequence[Batch] = ()) -> list[_Fit]:
        """Return whether each rank's largest micro-batch fits (collective); nothing if all have been assessed before.

        Args:
            largest: The largest micro-batch of each rank.
            accumulating: Whether it may have to fit beside the gradients of another one.
            micro_batches: Those of this rank, which are tried unless the engine has to plan.
        """
        engine = self.engine
        new = largest.sizes > self._proven[accumulating]
        # The same on every rank, which computes the sizes of all: they all return here or none does.
        if not new.any():
            return []
        if engine.shards_parameters:
            samples, tokens = int(largest.samples[engine.rank]), int(largest.tokens[engine.rank])
            result = self._estimate(samples, tokens, accumulating)
        else:
            batch = max(micro_batches, key=self._size_of)
            fits = not new[engine.rank] or self._try_in_memory(batch, accumulating)
            # The first step allocates the optimizer's state: a size that fits before it may not fit after it.
            result = _Fit(fits, holds=bool(engine.unwrapped_optimizer.state))
        results = [_Fit(*values) for values in engine.gather(result, "gather of what fits into memory")]
        proven = [result.fits and result.holds for result in results]
        # What fits next to gradients also fits without them.
        for with_grads in {False, accumulating}:
            np.maximum(self._proven[with_grads], largest.sizes, out=self._proven[with_grads], where=proven)
        return results

    def _lower(self, size: BatchSize, largest: _Largest, results: Sequence[_Fit]) -> dict[str, Any] | None:
        """Lower the limit below the micro-batch that does not fit and return the values to log; None if all fit.

        Samples are halved, tokens of a budget reduced by a quarter.
        """
        rank, result = min(enumerate(results), key=lambda item: item[1].fits, default=(0, _Fit(True)))
        if result.fits:
            return None
        estimate = {"needed_mib": result.needed_mib, "usable_mib": result.usable_mib} if result.needed_mib else {}
        tokens, budget = int(largest.tokens[rank]), size.micro_batch_tokens
        if largest.samples[rank] == 1:
            figures = f" ({result.needed_mib:,} of {result.usable_mib:,} MiB by the estimate)" if estimate else ""
            key = "micro_batch_tokens: a micro-batch has a sample" if budget else "micro_batch_size: 1 is the minimum"
            raise ConfigError(
                f"train.{key}, and a sample of {tokens} tokens does not fit into the memory of rank {rank}{figures}; "
                "try memory.activation_checkpointing=full, precision=bf16, shorter samples, or an engine that shards "
                "weights (fsdp2, zero3) or offloads them (zero3_offload)"
            )
        values = {"rank": rank, "tokens": tokens, **estimate}
        if budget:
            smaller = self.state.micro_batch_token_limit = int(largest.sizes[rank]) * 3 // 4
            return {"micro_batch_tokens": smaller, "before": budget, **values}
        smaller = self.state.micro_batch_limit = halve_micro_batch(size, self.engine.world_size)
        return {"micro_batch_size": smaller, "before": size.micro_batch_size, **values}

    def _estimate(self, samples: int, tokens: int, accumulating: bool) -> _Fit:
        """Return whether a micro-batch fits by the estimate, also in steps before the optimizer has its state."""
        latent, length = self.manifest.latent, -(-tokens // samples)
        # Samples of one length, which take no less than others with as many tokens, and far less time.
        batch = Batch(
            tokens=torch.zeros(samples * length, dtype=torch.int64),
            latents=torch.zeros(samples, latent.tokens, latent.channels),
            lengths=(length,) * samples,
            sample_ids=torch.zeros(samples, dtype=torch.int64),
            slots=torch.zeros(samples, dtype=torch.int64),
        )
        needed = self._memory_plan.needed_mib(all_masked(self.objective, batch), accumulating)
        usable = self._memory_plan.usable_mib()
        return _Fit(needed <= usable, True, round(needed), round(usable))

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
