"""Retention policy: which checkpoints to keep after a save, and which steps must be saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """Keeps the newest checkpoints, the best ones by validation loss, and checkpoints of fixed steps.

    Attributes:
        last: Number of newest checkpoints to keep, at least 1.
        every: Keep multiples of this step permanently, like `steps`. 0 for none.
        best: Number of checkpoints with the lowest validation loss to keep.
    """

    last: int = 3
    steps: tuple[int, ...] = ()
    every: int = 0
    best: int = 0

    def steps_to_keep(self, saved: int, others: Iterable[int], losses: Mapping[int, float | None]) -> set[int]:
        """Return the steps whose checkpoints to keep. The new one, `saved`, is always among them.

        `losses` has validation losses by step, None for a step without a validation.
        """
        older = sorted(others, reverse=True)
        permanent = {step for step in older if self.is_permanent(step)}
        # Of equal losses, keep the newer step.
        ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        best = {-negative for _, negative in ranked[: self.best]}
        return {saved, *older[: self.last - 1]} | permanent | best

    def max_checkpoints(self, steps: int) -> int:
        """Return the largest number of checkpoints that a run of `steps` steps keeps at once."""
        return self.last + self.best + len(set(self.steps)) + (steps // self.every if self.every else 0)

    def is_permanent(self, step: int) -> bool:
        """Return whether `step` must be saved and its checkpoint kept permanently."""
        return step in self.steps or bool(self.every and step and step % self.every == 0)
