"""Steps that are not taken, because a loss or a gradient norm is not finite or the norm is a spike.

All ranks decide alike: on settings and state, and on numbers that are the same on all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mmldlm.batch import Batch
from mmldlm.checkpoint.state import NORM_WINDOW, TrainState
from mmldlm.errors import NumericalError
from mmldlm.runtime.config import GuardConfig
from mmldlm.runtime.engine import Update
from mmldlm.telemetry.metrics import MetricsFile

FILE_NAME = "skipped_steps.jsonl"
WARM_UP = 20  # accepted norms that must be known first: those of a run's first steps fall fast


class Guard:
    """Judges steps, and counts those that are skipped; where it has a file, on rank 0, it writes them down."""

    def __init__(self, config: GuardConfig, state: TrainState):
        self.config, self.state = config, state
        self.file: MetricsFile | None = None
        self.losses: list[float] = []  # of this rank's micro-batches in the step at hand, as far as they were computed

    @property
    def norm_limit(self) -> float:
        """A gradient norm above it is a spike."""
        times, norms = self.config.grad_norm_spike, self.state.accepted_norms
        if times is None or len(norms) < WARM_UP:
            return math.inf
        return times * statistics.median(norms) or math.inf

    def take(self, norm: float) -> None:
        """The step was taken."""
        self.state.skipped_in_a_row = 0
        self.losses.clear()
        self.state.accepted_norms = [*self.state.accepted_norms, norm][-NORM_WINDOW:]

    def account(self, micro_batches: Sequence[Batch]) -> list[dict[str, Any]]:
        """This rank's part of a skipped step: samples and loss of each micro-batch."""
        pairs = zip_longest((batch.sample_ids.tolist() for batch in micro_batches), self.losses)
        return [{"samples": samples, "loss": loss} for samples, loss in pairs]

    def skip(self, update: Update, ranks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
        """The step was skipped; `ranks` are their accounts. Returns what to tell about it."""
        self.state.skipped_in_a_row += 1
        self.losses.clear()
        self.state.skipped_steps += 1
        norm = None if update.reason == "loss" else update.grad_norm
        limit = self.norm_limit if math.isfinite(self.norm_limit) else None
        if self.file is not None:
            written = [[{**part, "loss": _as_json(part["loss"])} for part in rank] for rank in ranks]
            record = {"reason": update.reason, "norm": _as_json(norm), "limit": limit, "ranks": written}
            self.file.write("skip", self.state.step, record)
            self.file.sync()
        loss = sum(part["loss"] for rank in ranks for part in rank if part["loss"] is not None)
        return {"reason": update.reason, "loss": loss, "optim/grad_norm": norm}

    def check(self, update: Update, run_dir: Path) -> None:
        """NumericalError where the run should not go on."""
        limit, config, in_a_row = self.norm_limit, self.config, self.state.skipped_in_a_row
        if in_a_row < config.max_consecutive and (config.nonfinite == "skip" or update.reason == "spike"):
            return
        what = {
            "loss": "the loss is not finite",
            "norm": f"the gradient norm is not finite ({update.grad_norm})",
            "spike": f"the gradient norm {update.grad_norm:g} is above {limit:g} (guard.grad_norm_spike)",
        }[update.reason or "norm"]
        raise NumericalError(
            f"step {self.state.step}: {what}; skipped in a row: {in_a_row} (guard.nonfinite: {config.nonfinite}, "
            f"guard.max_consecutive: {config.max_consecutive}); their samples are in {run_dir / FILE_NAME}"
        )


def skips_file(run_dir: Path, step: int, resumed: bool) -> AbstractContextManager[MetricsFile]:
    """The file of skipped steps; a resumed run drops those after its `step`, since it does them again."""
    return closing(MetricsFile(run_dir / FILE_NAME, step if resumed else None))


def _as_json(value: float | None) -> float | str | None:
    """JSON has neither nan nor inf."""
    return value if value is None or math.isfinite(value) else str(value)
