"""`StepGuard`: counts skipped steps, with a non-finite loss or gradient norm or a spike in the norm.

All ranks skip a step or none does, without an extra exchange and without waiting for the device. A non-finite loss
makes all gradients of its rank NaN, and so the global gradient norm, which all ranks share. The device skips the update
by this norm. The host makes the same decision later, when it has fetched the norm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mmldlm.checkpoint.state import NORM_WINDOW, TrainState
from mmldlm.config import GuardConfig
from mmldlm.distributed.grad_scaler import MIN_SCALE
from mmldlm.errors import NumericalError
from mmldlm.telemetry.metrics import MetricsFile

MicroBatchRecords = list[dict[str, Any]]  # samples and loss of each micro-batch of a rank

SKIPS_FILE = "skipped_steps.jsonl"
MIN_ACCEPTED_NORMS = 20  # accepted steps before we detect spikes, because norms fall fast in a run's first steps


@dataclass(frozen=True)
class Skip:
    """A skipped step."""

    step: int
    norm: float
    reason: Literal["loss", "norm", "spike", "overflow"]
    loss_scale: float = MIN_SCALE

    @classmethod
    def classify(cls, step: int, norm: float, ranks: Sequence[MicroBatchRecords], loss_scale: float) -> Skip:
        """Derive the reason of a skip from the norm and from the records of all ranks.

        Non-finite gradients are an overflow of fp16 and no fault of the run, if `loss_scale` can still be lowered.
        """
        if not all(math.isfinite(record["loss"]) for records in ranks for record in records):
            return cls(step, norm, "loss")
        if loss_scale > MIN_SCALE and not math.isfinite(norm):
            return cls(step, norm, "overflow", loss_scale)
        return cls(step, norm, "spike" if math.isfinite(norm) else "norm")


class StepGuard:
    """Counts skipped steps and decides when they end the run."""

    def __init__(self, config: GuardConfig, state: TrainState, file: MetricsFile | None = None):
        self.config, self.state = config, state
        self.file = file  # on rank 0: gets a record of each skipped step

    @property
    def norm_limit(self) -> float:
        """The largest gradient norm that does not count as a spike."""
        factor, norms = self.config.grad_norm_spike, self.state.accepted_norms
        if factor is None or len(norms) < MIN_ACCEPTED_NORMS:
            return math.inf
        # With a median of 0, every later step would be a spike.
        return factor * statistics.median(norms) or math.inf

    def record_accepted(self, norm: float) -> None:
        """Count an accepted step."""
        self.state.skipped_in_a_row = 0
        self.state.accepted_norms = [*self.state.accepted_norms, norm][-NORM_WINDOW:]

    def skip(self, skip: Skip, ranks: Sequence[MicroBatchRecords]) -> dict[str, Any]:
        """Count and record a skipped step. Return the values of its event in `metrics.jsonl`."""
        self.state.skipped_in_a_row += skip.reason != "overflow"
        self.state.skipped_steps += 1
        # A non-finite loss makes the norm NaN by design, so the norm says nothing.
        norm = None if skip.reason == "loss" else skip.norm
        limit = self.norm_limit if math.isfinite(self.norm_limit) else None
        if self.file is not None:
            batches = [[{**record, "loss": _json_float(record["loss"])} for record in records] for records in ranks]
            record = {"reason": skip.reason, "norm": _json_float(norm), "limit": limit, "ranks": batches}
            record |= {"loss_scale": skip.loss_scale} if skip.reason == "overflow" else {}
            self.file.write("skip", skip.step, record)
            self.file.sync()
        return {
            "reason": skip.reason,
            "loss": sum(record["loss"] for records in ranks for record in records),
            "optim/grad_norm": norm,
            **({"optim/loss_scale": skip.loss_scale} if skip.reason == "overflow" else {}),
        }

    def check(self, skip: Skip, run_dir: Path) -> None:
        """Raise `NumericalError` if the settings end the run at this skip."""
        if skip.reason == "overflow":
            return
        limit, config, in_a_row = self.norm_limit, self.config, self.state.skipped_in_a_row
        if in_a_row < config.max_consecutive and (config.nonfinite == "skip" or skip.reason == "spike"):
            return
        reason = {
            "loss": "the loss is not finite",
            "norm": f"the gradient norm is not finite ({skip.norm})",
            "spike": f"the gradient norm {skip.norm:g} is above {limit:g} (guard.grad_norm_spike)",
        }[skip.reason]
        raise NumericalError(
            f"step {skip.step}: {reason}; skipped in a row: {in_a_row} (guard.nonfinite: {config.nonfinite}, "
            f"guard.max_consecutive: {config.max_consecutive}); their samples are in {run_dir / SKIPS_FILE}"
        )


def _json_float(value: float | None) -> float | str | None:
    """Return NaN and infinities as text, because JSON has no numbers for them."""
    return value if value is None or math.isfinite(value) else str(value)
