"""Values of an optimizer step that pass from one method of the trainer to the next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mmldlm.distributed.collectives import PendingSum


@dataclass(frozen=True)
class StepTotals:
    """Totals of an optimizer step over all ranks, the same on each; the first access waits for their exchange.

    Attributes:
        counts: Denominators of the losses, by entry of `Objective.__call__`, followed by the values of `names` (see
            `Trainer.sync`), and by seconds and FLOPs of each rank's last steps.
        samples: Samples of the global batch.
        flops: FLOPs of this rank in this step.
    """

    counts: PendingSum
    names: tuple[str, ...]
    ranks: int
    samples: int
    flops: float

    def __getitem__(self, name: str) -> int:
        return int(self.counts[self.names.index(name) - len(self.names) - 2 * self.ranks])

    def work(self) -> np.ndarray:
        """Return seconds and FLOPs of the steps that each rank has measured since the last step, [2, ranks]."""
        return np.array(self.counts[-2 * self.ranks :]).reshape(2, -1)


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    lr: float
    grad_norm: Tensor  # [], on the device: before clipping
