"""Steps that are not taken, because a loss or a gradient norm is not finite or the norm is a spike.

All ranks skip or none, without asking each other and without a wait for the device: a loss that is not finite makes
every gradient of its rank NaN, so the norm, one number that all ranks share, tells all of them. The engine leaves out
the update where the norm is unfit; here the host judges by the same number, once it has been fetched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mmldlm.checkpoint.state import NORM_WINDOW, TrainState
from mmldlm.config import GuardConfig
from mmldlm.data.dataset import Split
from mmldlm.distributed.grad_scaler import LOWEST
from mmldlm.errors import NumericalError
from mmldlm.telemetry.meter import StepNumbers
from mmldlm.telemetry.metrics import MetricsFile

Account = list[dict[str, Any]]  # of one rank: samples and loss of each micro-batch

FILE_NAME = "skipped_steps.jsonl"
WARM_UP = 20  # accepted norms that must be known first: those of a run's first steps fall fast


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """`loss`, whose gradients are all NaN where it is not finite: 0 * inf and 0 * NaN are NaN, all else gives a 1."""
    return loss * (1 + 0 * loss.detach())


@dataclass(frozen=True)
class Skip:
    """A step that was not taken."""

    step: int
    norm: float
    reason: Literal["loss", "norm", "spike", "overflow"]
    loss_scale: float = LOWEST

    @classmethod
    def because(cls, step: int, norm: float, ranks: Sequence[Account], loss_scale: float) -> Skip:
        """With the reason that a norm which is not fit has, by the `ranks`' accounts of the step.

        Gradients that are not finite are no fault of the run's where a smaller `loss_scale` may mend them.
        """
        if not all(math.isfinite(part["loss"]) for rank in ranks for part in rank):
            return cls(step, norm, "loss")
        if loss_scale > LOWEST and not math.isfinite(norm):
            return cls(step, norm, "overflow", loss_scale)
        return cls(step, norm, "spike" if math.isfinite(norm) else "norm")


def account(numbers: StepNumbers, split: Split) -> Account:
    """This rank's part of a skipped step; its samples are rows of `split`."""
    pairs = zip(numbers.sample_ids, numbers.losses.tolist(), strict=True)
    return [{"samples": split.by_source(sample_ids), "loss": loss} for sample_ids, loss in pairs]


class Guard:
    """Judges steps, and counts those that are skipped; where it has a file, on rank 0, it writes them down."""

    def __init__(self, config: GuardConfig, state: TrainState):
        self.config, self.state = config, state
        self.file: MetricsFile | None = None

    @property
    def norm_limit(self) -> float:
        """A gradient norm above it is a spike."""
        times, norms = self.config.grad_norm_spike, self.state.accepted_norms
        if times is None or len(norms) < WARM_UP:
            return math.inf
        return times * statistics.median(norms) or math.inf

    def record_accepted(self, norm: float) -> None:
        """A step was taken."""
        self.state.skipped_in_a_row = 0
        self.state.accepted_norms = [*self.state.accepted_norms, norm][-NORM_WINDOW:]

    def skip(self, skip: Skip, ranks: Sequence[Account]) -> dict[str, Any]:
        """A step was skipped; `ranks` are their accounts. Returns what to tell about it."""
        self.state.skipped_in_a_row += skip.reason != "overflow"
        self.state.skipped_steps += 1
        norm = None if skip.reason == "loss" else skip.norm
        limit = self.norm_limit if math.isfinite(self.norm_limit) else None
        if self.file is not None:
            written = [[{**part, "loss": _as_json(part["loss"])} for part in rank] for rank in ranks]
            record = {"reason": skip.reason, "norm": _as_json(norm), "limit": limit, "ranks": written}
            record |= {"loss_scale": skip.loss_scale} if skip.reason == "overflow" else {}
            self.file.write("skip", skip.step, record)
            self.file.sync()
        return {
            "reason": skip.reason,
            "loss": sum(part["loss"] for rank in ranks for part in rank),
            "optim/grad_norm": norm,
            **({"optim/loss_scale": skip.loss_scale} if skip.reason == "overflow" else {}),
        }

    def check(self, skip: Skip, run_dir: Path) -> None:
        """NumericalError where the run should not go on."""
        if skip.reason == "overflow":
            return
        limit, config, in_a_row = self.norm_limit, self.config, self.state.skipped_in_a_row
        if in_a_row < config.max_consecutive and (config.nonfinite == "skip" or skip.reason == "spike"):
            return
        what = {
            "loss": "the loss is not finite",
            "norm": f"the gradient norm is not finite ({skip.norm})",
            "spike": f"the gradient norm {skip.norm:g} is above {limit:g} (guard.grad_norm_spike)",
        }[skip.reason]
        raise NumericalError(
            f"step {skip.step}: {what}; skipped in a row: {in_a_row} (guard.nonfinite: {config.nonfinite}, "
            f"guard.max_consecutive: {config.max_consecutive}); their samples are in {run_dir / FILE_NAME}"
        )


def skips_file(run_dir: Path, step: int, resumed: bool) -> AbstractContextManager[MetricsFile]:
    """The file of skipped steps; a resumed run drops those after its `step`, since it does them again."""
    return closing(MetricsFile(run_dir / FILE_NAME, step if resumed else None))


def _as_json(value: float | None) -> float | str | None:
    """JSON has neither nan nor inf."""
    return value if value is None or math.isfinite(value) else str(value)
