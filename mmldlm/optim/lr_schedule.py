"""The learning rate of a step: warmup, the course behind it, its share of the batch's size, and what a plateau took.

All but the plateau is a pure function of the step, so it resumes as it is. What a plateau took lies in `TrainState`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from mmldlm.checkpoint.state import LOSS_WINDOW, TrainState
from mmldlm.optim.config import OptimConfig
from mmldlm.settings.fields import setting

Course = Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "plateau"]
ALL: tuple[Course, ...] = get_args(Course)

# The settings that not every course reads, with those that do.
READERS: dict[str, tuple[Course, ...]] = {
    "min_lr_ratio": ("linear", "cosine", "cosine_restarts", "wsd"),
    "restart_period": ("cosine_restarts",),
    "decay_steps": ("wsd",),
    "patience": ("plateau",),
    "factor": ("plateau",),
    "min_lr": ("plateau",),
    "threshold": ("plateau",),
}


@dataclass(frozen=True)
class ScheduleConfig:
    lr: Course = setting(
        "cosine",
        "course of the learning rate after warmup. linear, cosine: down to the last step; cosine_restarts: from the "
        "peak again in each period; wsd: constant, and down over the last steps; plateau: times `schedule.factor` "
        "where the validation loss, or without validation the training loss, has stopped falling",
    )
    min_lr_ratio: float = setting(
        0.1,
        "lowest learning rate over the peak: of linear, cosine and wsd that of the last step, of cosine_restarts what "
        "each period approaches",
        at_least=0,
        at_most=1,
    )
    restart_period: int | float = setting(
        0.25, "cosine_restarts: steps of a period; below 1: that fraction of the steps behind the warmup", above=0
    )
    decay_steps: int | float = setting(
        0.2, "wsd: the last steps, over which the rate falls; below 1: that fraction of train.steps", above=0
    )
    patience: int = setting(
        1000, "plateau: steps without a new lowest loss beyond which the learning rate is cut", at_least=1
    )
    factor: float = setting(0.5, "plateau: learning rate after a cut over that before", above=0, below=1)
    min_lr: float = setting(1e-6, "plateau: learning rate that no cut goes below", at_least=0)
    threshold: float = setting(
        0.01, "plateau: share of the lowest loss by which another must lie below it to be new", at_least=0, below=1
    )

    def __post_init__(self) -> None:
        for name in ("restart_period", "decay_steps"):
            steps = getattr(self, name)
            if steps >= 1 and steps != int(steps):
                raise ValueError(f"{name}: expected a whole number or a fraction below 1, found {steps}")
        defaults = {field.name: field.default for field in fields(self)}
        for name, courses in READERS.items():
            if self.lr not in courses and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}: does nothing under schedule.lr: {self.lr}, expected its default {defaults[name]} or "
                    f"lr: {' or '.join(courses)}"
                )


def steps_of(number: int | float, of: int) -> int:
    """A number of steps that is given as such, or below 1 as a fraction `of` steps, rounded up."""
    return math.ceil(number * of) if number < 1 else int(number)


def resolved_warmup(optim: OptimConfig, total_steps: int) -> int:
    steps = steps_of(optim.warmup_steps, total_steps)
    if optim.warmup_bounds is not None:
        least, most = optim.warmup_bounds
        steps = min(max(steps, least), most)
    return steps


def batch_scale(optim: OptimConfig, global_batch_size: int) -> float:
    """What `optim.lr_scaling` multiplies the learning rate of a step with this many samples by.

    linear: arXiv 1706.02677, section 2.1. sqrt: arXiv 1404.5997, which keeps the variance of an update.
    """
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[optim.lr_scaling]
    return (global_batch_size / optim.lr_reference_batch) ** power


def lr_at(
    step: int,
    total_steps: int,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    scale: float = 1.0,
    cuts: int = 0,
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    `scale` is the `batch_scale` of the step's batch, `cuts` how often a plateau has cut the rate.
    """
    peak, warmup = scale * optim.lr, resolved_warmup(optim, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    behind, rest = step - warmup, max(1, total_steps - 1 - warmup)  # rest: steps from the peak to the last one
    if schedule.lr == "constant":
        return peak
    if schedule.lr == "plateau":
        return max(peak * schedule.factor**cuts, min(peak, schedule.min_lr))
    if schedule.lr == "linear":
        remaining = 1 - min(1.0, behind / rest)
    elif schedule.lr == "cosine":  # SGDR (arXiv 1608.03983), eq. 5, without restarts
        remaining = _half_cosine(min(1.0, behind / rest))
    elif schedule.lr == "cosine_restarts":  # SGDR, eq. 5, with periods of equal length
        period = resolved_period(schedule, total_steps, warmup)
        remaining = _half_cosine(behind % period / period)
    else:  # the trapezoid of arXiv 2404.06395, with the linear decay of arXiv 2405.18392
        decay = resolved_decay(schedule, total_steps, warmup)
        remaining = min(1.0, max(0.0, (total_steps - 1 - step) / decay))
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def resolved_period(schedule: ScheduleConfig, total_steps: int, warmup: int) -> int:
    return max(1, steps_of(schedule.restart_period, total_steps - warmup))


def resolved_decay(schedule: ScheduleConfig, total_steps: int, warmup: int) -> int:
    """Steps of wsd's fall, which does not begin within the warmup."""
    return max(1, min(steps_of(schedule.decay_steps, total_steps), total_steps - 1 - warmup))


def describe_lr(total_steps: int, optim: OptimConfig, schedule: ScheduleConfig, global_batch_size: int) -> str:
    """The learning rate as it was resolved, for the user; `global_batch_size` is that of the first step."""
    peak, warmup = batch_scale(optim, global_batch_size) * optim.lr, resolved_warmup(optim, total_steps)
    text = f"{peak:.4g}"
    if optim.lr_scaling != "none":
        rule = "the root of " * (optim.lr_scaling == "sqrt") + f"{global_batch_size} / {optim.lr_reference_batch}"
        text += f" = {optim.lr:g} x {rule} samples"
    text += f", {warmup} warmup steps, "
    floor = f" to {schedule.min_lr_ratio * peak:.4g}"
    return (
        text
        + {
            "constant": "constant",
            "linear": "linear" + floor,
            "cosine": "cosine" + floor,
            "cosine_restarts": f"cosine{floor} in periods of {resolved_period(schedule, total_steps, warmup)} steps",
            "wsd": f"constant, linear{floor} over the last {resolved_decay(schedule, total_steps, warmup)} steps",
            "plateau": f"times {schedule.factor:g} after {schedule.patience} steps without progress, down to "
            f"{schedule.min_lr:g}",
        }[schedule.lr]
    )


class Plateau:
    """Cuts the learning rate where the loss has stopped falling; the same on all ranks, from losses over all ranks.

    As torch.optim.lr_scheduler.ReduceLROnPlateau with a relative threshold, but patience counts optimizer steps, not
    measurements, and begins behind the warmup.
    """

    def __init__(self, schedule: ScheduleConfig, state: TrainState, warmup: int, validates: bool):
        """`validates`: whether losses come from `measure`; else from `train`, step by step."""
        self.schedule, self.state, self.warmup, self.of_training = schedule, state, warmup, not validates
        # The training loss is restless: it counts as its mean over so many steps.
        self.window = max(1, min(LOSS_WINDOW, schedule.patience // 10))

    def measure(self, step: int, loss: float) -> None:
        """The loss after `step` steps; one that is not finite is no progress."""
        state, best = self.state, self.state.plateau_best
        if math.isfinite(loss) and (best is None or loss < best * (1 - self.schedule.threshold)):
            state.plateau_best, state.plateau_since = loss, step
        elif step - max(state.plateau_since, self.warmup) > self.schedule.patience:
            state.lr_cuts, state.plateau_since = state.lr_cuts + 1, step

    def train(self, step: int, loss: float | None) -> None:
        """The training loss of step number `step`, counted from 1; None where it was skipped."""
        if loss is not None:
            self.state.plateau_losses.append(loss)
        if self.due(step) and self.state.plateau_losses:
            self.measure(step, math.fsum(self.state.plateau_losses) / len(self.state.plateau_losses))
            self.state.plateau_losses.clear()

    def due(self, step: int) -> bool:
        """Whether the learning rate behind `step` may depend on the training losses up to it."""
        return self.of_training and step % self.window == 0
