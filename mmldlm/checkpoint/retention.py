"""Which checkpoints stay when a new one is there, and which steps must have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """The newest `last`, the `best` by validation loss, those of `steps`, and of every multiple of `every`."""

    last: int = 3
    steps: tuple[int, ...] = ()
    every: int = 0  # 0: none
    best: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"at least the last checkpoint must be kept, not {self.last}")

    def kept(self, saved: int, others: Iterable[int], losses: Mapping[int, float | None]) -> set[int]:
        """Which of these steps stay beside `saved`, the new one; `losses` are those of the steps with a validation."""
        older = sorted(others, reverse=True)
        permanent = {step for step in older if self.is_permanent(step)}
        return {saved, *older[: self.last - 1]} | permanent | self._best(losses)

    def most(self, steps: int) -> int:
        """How many there may be at once in a run of so many steps."""
        return self.last + self.best + len(set(self.steps)) + (steps // self.every if self.every else 0)

    def is_permanent(self, step: int) -> bool:
        """Whether the checkpoint of `step` is kept for good, so that one has to be made."""
        return step in self.steps or bool(self.every and step and step % self.every == 0)

    def _best(self, losses: Mapping[int, float | None]) -> set[int]:
        ranked = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        return {-negative for _, negative in ranked[: self.best]}
