"""Learning rate of a step: warmup, the schedule after it, scaling by the batch size, and cuts at plateaus of the loss.

Warmup, schedule and scaling are pure functions of the step, so they need no state to resume. The state of a plateau is
in `TrainState`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mmldlm.checkpoint.state import LOSS_WINDOW, TrainState
from mmldlm.optim.config import OptimConfig
from mmldlm.settings.declaration import require_effect, setting

ScheduleName = Literal["constant", "linear", "cosine", "cosine_restarts", "wsd", "plateau"]

# The settings that only some schedules read, with these schedules.
SCHEDULES_READING: dict[str, tuple[ScheduleName, ...]] = {
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
    """Settings of the learning-rate schedule after the warmup."""

    lr: ScheduleName = setting(
        "cosine",
        "learning-rate schedule after the warmup. linear, cosine: decay until the last step. cosine_restarts: "
        "cosine decay from the peak in each period. wsd: constant, then linear decay over the last steps. "
        "plateau: multiply by `schedule.factor` when the validation loss stops falling (without validations the "
        "training loss)",
        advice="constant if you do not know the length of the run yet, since all other schedules depend on train.steps",
    )
    min_lr_ratio: float = setting(
        0.1,
        "lowest learning rate as a fraction of the peak, reached at the last step (linear, cosine, wsd) or approached "
        "at the end of each period (cosine_restarts)",
        at_least=0,
        at_most=1,
    )
    restart_period: int | float = setting(
        0.25,
        "cosine_restarts: steps of a period. A number below 1 is a fraction of the steps after the warmup",
        above=0,
    )
    decay_steps: int | float = setting(
        0.2, "wsd: number of last steps with decay. A number below 1 is a fraction of train.steps", above=0
    )
    patience: int = setting(
        1000, "plateau: cut the learning rate after this many steps without a new lowest loss", at_least=1
    )
    factor: float = setting(0.5, "plateau: factor of the learning rate at each cut", above=0, below=1)
    min_lr: float = setting(1e-6, "plateau: lower bound of the learning rate", at_least=0)
    threshold: float = setting(
        0.01, "plateau: a loss is a new lowest loss if it is lower by at least this fraction", at_least=0, below=1
    )

    def __post_init__(self) -> None:
        for name in ("restart_period", "decay_steps"):
            steps = getattr(self, name)
            if steps >= 1 and steps != int(steps):
                raise ValueError(f"{name}: expected a whole number or a fraction below 1, found {steps}")
        for name, schedules in SCHEDULES_READING.items():
            require_effect(self, name, "lr", *schedules)


def resolve_steps(number: int | float, total: int) -> int:
    """Return a number of steps. A `number` below 1 is a fraction of `total`, and is rounded up."""
    return math.ceil(number * total) if number < 1 else int(number)


def resolved_warmup(optim: OptimConfig, total_steps: int) -> int:
    """Return the number of warmup steps of a run."""
    steps = resolve_steps(optim.warmup_steps, total_steps)
    if optim.warmup_bounds is not None:
        low, high = optim.warmup_bounds
        steps = min(max(steps, low), high)
    return steps


def batch_scale(optim: OptimConfig, global_batch_size: int) -> float:
    """Return the factor of the learning rate by `optim.lr_scaling` for a step with this many samples.

    linear is from arXiv 1706.02677, section 2.1. sqrt keeps the variance of an update (arXiv 1404.5997).
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
    """Return the learning rate of a step, counted from 0.

    `scale` is the `batch_scale` of the step's global batch, and `cuts` how often a plateau has cut the rate.
    """
    peak, warmup = scale * optim.lr, resolved_warmup(optim, total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    elapsed, duration = step - warmup, max(1, total_steps - 1 - warmup)  # from the peak to `step`, to the last step
    if schedule.lr == "constant":
        return peak
    if schedule.lr == "plateau":
        return max(peak * schedule.factor**cuts, min(peak, schedule.min_lr))
    if schedule.lr == "linear":
        remaining = 1 - min(1.0, elapsed / duration)
    elif schedule.lr == "cosine":  # SGDR (arXiv 1608.03983), eq. 5, without restarts
        remaining = _half_cosine(min(1.0, elapsed / duration))
    elif schedule.lr == "cosine_restarts":  # SGDR, eq. 5, with periods of equal length
        period = resolved_period(schedule, total_steps, warmup)
        remaining = _half_cosine(elapsed % period / period)
    else:  # the trapezoid of arXiv 2404.06395, with the linear decay of arXiv 2405.18392
        decay = resolved_decay(schedule, total_steps, warmup)
        remaining = min(1.0, max(0.0, (total_steps - 1 - step) / decay))
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * remaining)


def _half_cosine(progress: float) -> float:
    """Return a half cosine from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def resolved_period(schedule: ScheduleConfig, total_steps: int, warmup: int) -> int:
    """Return the number of steps of a period of `cosine_restarts`."""
    return max(1, resolve_steps(schedule.restart_period, total_steps - warmup))


def resolved_decay(schedule: ScheduleConfig, total_steps: int, warmup: int) -> int:
    """Return the number of steps of the decay of `wsd`, which does not start before the end of the warmup."""
    return max(1, min(resolve_steps(schedule.decay_steps, total_steps), total_steps - 1 - warmup))


def describe_lr(total_steps: int, optim: OptimConfig, schedule: ScheduleConfig, global_batch_size: int) -> str:
    """Return the resolved learning rate and schedule as a line for the user, for the first step's global batch size."""
    peak, warmup = batch_scale(optim, global_batch_size) * optim.lr, resolved_warmup(optim, total_steps)
    text = f"{peak:.4g}"
    if optim.lr_scaling != "none":
        rule = "the root of " * (optim.lr_scaling == "sqrt") + f"{global_batch_size} / {optim.lr_reference_batch}"
        text += f" = {optim.lr:g} x {rule} samples"
    text += f", {warmup} warmup steps, "
    floor = f" to {schedule.min_lr_ratio * peak:.4g}"
    schedules = {
        "constant": "constant",
        "linear": "linear" + floor,
        "cosine": "cosine" + floor,
        "cosine_restarts": f"cosine{floor} in periods of {resolved_period(schedule, total_steps, warmup)} steps",
        "wsd": f"constant, linear{floor} over the last {resolved_decay(schedule, total_steps, warmup)} steps",
        "plateau": f"times {schedule.factor:g} after {schedule.patience} steps without progress, down to "
        f"{schedule.min_lr:g}",
    }
    return text + schedules[schedule.lr]


class Plateau:
    """Plateau schedule: cuts the learning rate when the loss over all ranks stops falling, at once on all ranks.

    Like `torch.optim.lr_scheduler.ReduceLROnPlateau` with a relative threshold, but patience counts optimizer steps
    instead of measurements, from the end of the warmup on.
    """

    def __init__(self, schedule: ScheduleConfig, state: TrainState, warmup: int, validates: bool):
        """If the run `validates`, call `observe` with validation losses, otherwise `observe_training_loss`."""
        self.schedule, self.state, self.warmup, self.uses_training_loss = schedule, state, warmup, not validates
        # The noisy training loss is averaged over this many steps.
        self.window = max(1, min(LOSS_WINDOW, schedule.patience // 10))

    def observe(self, step: int, loss: float) -> None:
        """Update the state with the loss after `step` steps. A non-finite loss counts as no progress."""
        state, best = self.state, self.state.plateau_best
        if math.isfinite(loss) and (best is None or loss < best * (1 - self.schedule.threshold)):
            state.plateau_best, state.plateau_since = loss, step
        elif step - max(state.plateau_since, self.warmup) > self.schedule.patience:
            state.lr_cuts, state.plateau_since = state.lr_cuts + 1, step

    def observe_training_loss(self, step: int, loss: float | None) -> None:
        """Update the state with the training loss of `step`, counted from 1. The loss of a skipped step is None."""
        if loss is not None:
            self.state.plateau_losses.append(loss)
        if self.due(step) and self.state.plateau_losses:
            self.observe(step, math.fsum(self.state.plateau_losses) / len(self.state.plateau_losses))
            self.state.plateau_losses.clear()

    def due(self, step: int) -> bool:
        """Return whether the learning rate after `step` may depend on the training losses up to it."""
        return self.uses_training_loss and step % self.window == 0
