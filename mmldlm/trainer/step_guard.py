"""`StepGuard`: skipped steps, whose loss or gradient norm is non-finite or whose norm is a spike.

All ranks skip a step or none does, without an additional exchange and without synchronizing with the device: a
non-finite loss makes every gradient of its rank NaN, and so the global gradient norm, which all ranks share. The engine
skips the update on the device by this norm; the host makes the same decision once the norm has been fetched.
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
MIN_ACCEPTED_NORMS = 20  # accepted norms before spikes are detected: norms fall fast in a run's first steps


@dataclass(frozen=True)
class Skip:
    """A skipped step."""

    step: int
    norm: float
    reason: Literal["loss", "norm", "spike", "overflow"]
    loss_scale: float = MIN_SCALE

    @classmethod
    def classify(cls, step: int, norm: float, ranks: Sequence[MicroBatchRecords], loss_scale: float) -> Skip:
        """Return the skip with its reason, derived from the norm and from the records of all ranks.

        Non-finite gradients under a `loss_scale` that can be lowered are an overflow of fp16, not a fault of the run.
        """
        if not all(math.isfinite(record["loss"]) for records in ranks for record in records):
            return cls(step, norm, "loss")
        if loss_scale > MIN_SCALE and not math.isfinite(norm):
            return cls(step, norm, "overflow", loss_scale)
        return cls(step, norm, "spike" if math.isfinite(norm) else "norm")


class StepGuard:
    """Counter and judge of skipped steps."""

    def __init__(self, config: GuardConfig, state: TrainState, file: MetricsFile | None = None):
        self.config, self.state = config, state
        self.file = file  # on rank 0: receives a record of each

    @property
    def norm_limit(self) -> float:
        """Largest gradient norm that is not a spike."""
        factor, norms = self.config.grad_norm_spike, self.state.accepted_norms
        if factor is None or len(norms) < MIN_ACCEPTED_NORMS:
            return math.inf
        # A median of 0 would make every later step a spike.
        return factor * statistics.median(norms) or math.inf

    def record_accepted(self, norm: float) -> None:
        """Count an accepted step."""
        self.state.skipped_in_a_row = 0
        self.state.accepted_norms = [*self.state.accepted_norms, norm][-NORM_WINDOW:]

    def skip(self, skip: Skip, ranks: Sequence[MicroBatchRecords]) -> dict[str, Any]:
        """Count and record a skipped step; return the values of its event in `metrics.jsonl`."""
        self.state.skipped_in_a_row += skip.reason != "overflow"
        self.state.skipped_steps += 1
        # A non-finite loss makes the norm NaN by design, so it says nothing.
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
    """Return NaN and infinities as strings, since JSON has no numbers for them."""
    return value if value is None or math.isfinite(value) else str(value)
