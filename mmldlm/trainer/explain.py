"""`explain_step`: which samples cause the gradient norm of a step, found by halving its batch.

Samples, times, masks and noise are functions of (seed, step, slot), so the gradient of a step is the sum of its
samples' gradients, and any part of it can be computed again. Of two halves, at least one has a gradient of half the
norm of both: the search goes on in the first if that is the one, and in the second otherwise. It takes a forward and
backward pass of half of the samples, then of a quarter, and so on, and at last one without the sample that remains.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import numpy as np

from mmldlm.diffusion.objective import total_counts
from mmldlm.trainer.trainer import Trainer

MAX_CAUSES = 2  # more samples are no outliers
USUAL_FACTOR = 10.0  # of the median norm, above which a step is a spike where `guard.grad_norm_spike` is not set


@dataclass
class Explanation:
    """The samples without which the gradient norm of a step is at most `limit`.

    Attributes:
        limit: Largest norm that is not a spike; of a step that is none, half of its norm.
        is_spike: Whether its norm is above the largest one that is not a spike.
        slots: The samples' slots, found in this order.
        rest: Gradient norm of all other samples.
    """

    norm: float
    limit: float
    is_spike: bool
    slots: list[int] = field(default_factory=list)
    rest: float = math.inf
    replays: int = 0

    @property
    def is_found(self) -> bool:
        """Return whether these samples alone cause the norm."""
        return self.rest <= self.limit


class _Parts:
    """Gradient norms of parts of a step's batch, with the weights of the trainer (collective)."""

    def __init__(self, trainer: Trainer, step: int, position: int):
        self.trainer, self.step, self.position = trainer, step, position
        self.size = trainer.components.loader.batch_at(step)
        self.slots = np.arange(self.size.global_batch_size)
        self.replays = 0
        batches = trainer.components.loader.read_slots(position, self.size, self.slots)
        # The denominators stay those of the whole step, so that gradients of parts add up.
        self._totals = total_counts(trainer.corrupt(step, batches)).tolist()

    def norm(self, slots: np.ndarray) -> float:
        """Return the gradient norm of the samples in some slots; infinite if it is not finite."""
        trainer, engine = self.trainer, self.trainer.engine
        self.replays += 1
        batches = trainer.components.loader.read_slots(self.position, self.size, slots)
        # Every rank computes all of them, so that none is without: the sum over the ranks has each of them that often.
        for batch in trainer.accumulate(trainer.corrupt(self.step, batches)):
            trainer.backward(trainer.components.objective(engine.forward, batch, self._totals)[0])
        norm = float(engine.update(0.0, 0.0, norm_limit=-1.0)) / engine.world_size  # a limit that no update passes
        return norm if math.isfinite(norm) else math.inf


def explain_step(trainer: Trainer, step: int, position: int, norm: float | None = None) -> Explanation:
    """Find the samples that cause the gradient norm of a step, counted from 0 (collective); no weight changes.

    Args:
        trainer: A trainer with the weights before the step.
        position: Position of the step's first sample in the order.
        norm: Its gradient norm, if it is known.
    """
    parts = _Parts(trainer, step, position)
    total = parts.norm(parts.slots) if norm is None else norm if math.isfinite(norm) else math.inf
    limit, accepted = trainer.guard.norm_limit, trainer.state.accepted_norms
    if math.isinf(limit) and accepted:
        limit = USUAL_FACTOR * statistics.median(accepted)
    result = Explanation(total, limit if total > limit else min(total / 2, 1e300), total > limit)
    rest = parts.slots
    while total > result.limit and len(result.slots) < MAX_CAUSES and len(rest) > 1:
        result.slots.append(_largest(parts, rest, total))
        rest = np.setdiff1d(rest, result.slots)
        total = result.rest = parts.norm(rest)
    result.replays = parts.replays
    return result


def _largest(parts: _Parts, slots: np.ndarray, norm: float) -> int:
    """Return the slot that halving leads to; `norm` is at most that of all `slots`."""
    while len(slots) > 1:
        first, second = np.array_split(slots, 2)
        of_first = parts.norm(first)
        slots, norm = (first, of_first) if of_first >= norm / 2 else (second, norm - of_first)
    return int(slots[0])


def sample_names(trainer: Trainer, step: int, position: int, result: Explanation) -> list[str]:
    """Return the names STORE:INDEX of the samples that an explanation has found."""
    loader, split = trainer.components.loader, trainer.components.store.split("train")
    batches = loader.read_slots(position, loader.batch_at(step), np.array(result.slots, np.int64))
    return [split.sample_name(index) for batch in batches for index in batch.sample_ids.tolist()]
