"""Retention policy: which checkpoints are kept after a save, and which steps must have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Keeps the newest checkpoints, the best by validation loss, and those of fixed steps.

    Attributes:
        last: Number of newest checkpoints, at least 1.
        every: Multiples of this step are kept permanently, as `steps` are; 0 for none.
        best: Number of checkpoints with the lowest validation loss.
    """

    last: int = 3
    steps: tuple[int, ...] = ()
    every: int = 0
    best: int = 0

    def steps_to_keep(self, saved: int, others: Iterable[int], losses: Mapping[int, float | None]) -> set[int]:
        """Return the steps whose checkpoints are kept, always that of the new one, `saved`.

        `losses` are validation losses by step; None for a step without a validation.
        """
        older = sorted(others, reverse=True)
        permanent = {step for step in older if self.is_permanent(step)}
        ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None)  # ties: the newer step
        best = {-negative for _, negative in ranked[: self.best]}
        return {saved, *older[: self.last - 1]} | permanent | best

    def max_checkpoints(self, steps: int) -> int:
        """Return the largest number of checkpoints kept at once in a run of `steps` steps."""
        return self.last + self.best + len(set(self.steps)) + (steps // self.every if self.every else 0)

    def is_permanent(self, step: int) -> bool:
        """Return whether `step` must be saved and its checkpoint kept permanently."""
        return step in self.steps or bool(self.every and step and step % self.every == 0)
