"""What the loop adds up between two log records."""

from __future__ import annotations

import time

from torch import Tensor


class Meter:
    """Sums of losses and work since the last log record, and the seconds they took."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.sums: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.tokens = self.samples = self.steps = 0
        self.data_wait_s = 0.0
        self.began = time.perf_counter()
        self.forget()

    def add(self, sums: Tensor, counts: Tensor) -> None:
        """A micro-batch of the step at hand; counts once the step is taken."""
        self._step.append((sums, counts))

    def forget(self) -> None:
        """A skipped step: its losses are no part of any mean."""
        self._step: list[tuple[Tensor, Tensor]] = []

    def take(self, tokens: int, samples: int) -> None:
        """The step was taken; its tokens and samples are those over all ranks."""
        for sums, counts in self._step:
            self.sums = self.sums + sums.double()
            self.counts = self.counts + counts
        self.tokens += tokens
        self.samples += samples
        self.steps += 1
        self.forget()
