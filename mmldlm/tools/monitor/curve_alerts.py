"""Alerts that follow from a run's curves: losses, gradient norms, and steps that were skipped."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mmldlm.tools.history.run_history import CURVES
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot, values_of

_BLOCK = 10  # records of which a median is taken, so that one odd batch is no news
_SIGMAS = 4.0  # by which two such medians must differ

_REASONS = {
    "loss": "the loss was not finite",
    "norm": "the gradients were not finite",
    "spike": "the gradient norm was a spike",
}


def skipped(look: Snapshot) -> Alert | None:
    """Steps that were left out, but for a loss scale of fp16 that is on its way down."""
    step = look.history.step
    recent = [record for record in look.history.of("skip") if record["step"] > step - look.thresholds.skip_steps]
    found = [record for record in recent if record.get("reason") != "overflow"]
    if not found:
        return None
    reasons = Counter(_REASONS.get(record.get("reason", ""), "unfit") for record in found)
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    window, steps = min(step, look.thresholds.skip_steps), ", ".join(str(record["step"]) for record in found[-3:])
    return Alert(
        "skipped steps",
        f"{len(found)} of the last {window} steps were skipped: {why}; the latest: {steps}",
        "skipped_steps.jsonl in the run folder names their samples: `mmldlm data verify` the store if they are the "
        "same again and again, lower optim.lr if they are others each time; guard.* says when the run gives up",
    )


def overflow(look: Snapshot) -> Alert | None:
    """fp16 that loses steps for good, not only until its loss scale has come down."""
    window, step = 200, look.history.step
    found = [record for record in look.history.of("skip") if record.get("reason") == "overflow"]
    recent = [record for record in found if record["step"] > step - window]
    if step < window or len(recent) <= look.thresholds.overflow_share * window:
        return None
    return Alert(
        "overflow",
        f"fp16 overflowed in {len(recent)} of the last {window} steps",
        "use precision=bf16 where the device can; otherwise lower optim.lr",
    )


def not_finite(look: Snapshot) -> Alert | None:
    """A loss whose latest value is NaN or infinite; a norm that is not is of a step that was left out."""
    for kind in CURVES:
        latest = look.history.last(kind) or {}
        losses = [tag for tag in latest.get("nonfinite") or [] if tag.startswith(("loss/", "validation/"))]
        if losses:
            return Alert(
                "not finite",
                f"{', '.join(losses[:3])} at step {latest['step']}",
                "go back to a checkpoint before that step (resume=PATH) with a lower optim.lr",
            )
    return None


def rising_loss(look: Snapshot) -> Alert | None:
    """The loss is above where it was, by more than chance and `thresholds.rise`, or even above that of the start.

    Or each of the last three validations was worse than the one before.
    """
    return _diverged(look) or _rising_training(look) or _rising_validation(look)


def _diverged(look: Snapshot) -> Alert | None:
    losses = values_of(look.train, "loss/total")
    untrained, now = losses[:3], losses[3:][-_BLOCK:]
    if len(now) < _BLOCK:
        return None
    found, limit = statistics.median(now), max(untrained) + look.thresholds.diverged * abs(max(untrained))
    if found <= limit:
        return None
    return Alert(
        "rising loss",
        f"loss/total is {found:.4g} (median of {_BLOCK} records), more than at the start ({max(untrained):.4g})",
        "the run has diverged and will not come back by itself: start again with a lower optim.lr or a longer "
        "optim.warmup_steps",
    )


def _rising_training(look: Snapshot) -> Alert | None:
    losses = values_of(look.train, "loss/total")
    blocks = [losses[end - _BLOCK : end] for end in range(len(losses), _BLOCK - 1, -_BLOCK)]  # the latest first
    if len(blocks) < 3:
        return None
    medians = [statistics.median(block) for block in blocks]
    scatter = statistics.median(abs(value - medians[i]) for i, block in enumerate(blocks[:10]) for value in block)
    # Of a median of n normal values; 1.48 makes a median deviation a standard one.
    chance = math.sqrt(2) * 1.2533 * 1.4826 * scatter / math.sqrt(_BLOCK)
    lowest = min(medians[1:])
    if medians[0] - lowest <= max(_SIGMAS * chance, look.thresholds.rise * abs(lowest)):
        return None
    return Alert(
        "rising loss",
        f"loss/total is {medians[0]:.4g} (median of {_BLOCK} records) and was {lowest:.4g}",
        "optim.lr is too high, or its warm-up too short: go back to a checkpoint from before (resume=PATH) with less; "
        "if mode_schedule or train.batch_schedule just changed what is measured, wait",
    )


def _rising_validation(look: Snapshot) -> Alert | None:
    losses = look.history.series("validation/total", "validation").values
    if len(losses) < 4 or not all(map(math.isfinite, losses)):
        return None
    lowest, recent = min(losses), losses[-4:]
    limit = lowest + look.thresholds.validation_rise * abs(lowest)
    if min(recent[1:]) <= limit or any(later <= earlier for earlier, later in pairwise(recent)):
        return None
    return Alert(
        "rising loss",
        f"validation/total rose three times in a row, to {losses[-1]:.4g}; its lowest was {lowest:.4g}",
        "if loss/total still falls, the model learns its data by heart: stop here and take the best checkpoint "
        "(checkpoint.keep_best), use more data or a smaller model; if it rises too, lower optim.lr",
    )


def plateau(look: Snapshot) -> Alert | None:
    """In the last quarter of the steps the loss fell by less than `thresholds.flat`, for certain.

    Told only while the learning rate is above a third of its peak: a small one is meant to end a run like that.
    """
    rates = values_of(look.train, "optim/lr")
    if not rates or rates[-1] < max(rates) / 3 or rising_loss(look):
        return None
    series = look.history.series("validation/total", "validation")
    tag = "validation/total"
    if len(series.steps) < 8:
        series, tag = look.history.series("loss/total", "train"), "loss/total"
    last = series.steps[-1] if series.steps else 0
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    before = [value for step, value in points if last / 2 < step <= last * 3 / 4]
    recent = [value for step, value in points if step > last * 3 / 4]
    if min(len(before), len(recent)) < (2 if tag.startswith("validation") else 2 * _BLOCK):
        return None
    fall = statistics.fmean(before) - statistics.fmean(recent)
    chance = 2 * math.hypot(_error(before), _error(recent))
    if fall + chance >= look.thresholds.flat * abs(statistics.fmean(before)):
        return None
    return Alert(
        "plateau",
        f"{tag} fell by {fall:.2g} in the last quarter of the steps, and is {statistics.fmean(recent):.4g}",
        "schedule.lr=plateau or a lower optim.lr may bring it down further; from the start on, optim.lr is too low or "
        "too high, or the wrong parts are frozen",
    )


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean; a trend within counts as scatter."""
    return statistics.stdev(values) / math.sqrt(len(values))


def gradient_norm(look: Snapshot) -> Alert | None:
    """It has jumped, or clipping leaves next to nothing of it."""
    norms = values_of(look.train, "optim/grad_norm")
    now, before = norms[-5:], norms[-105:-5]
    if len(before) >= 20:
        usual, found = statistics.median(before), statistics.median(now)
        if found > look.thresholds.norm_jump * usual:
            return Alert(
                "gradient norm",
                f"{found:.3g} (median of 5 records), before {usual:.3g}",
                "if the loss rises too, go back to a checkpoint from before (resume=PATH) with a lower optim.lr; "
                "guard.grad_norm_spike leaves out steps like these",
            )
    clip = (look.history.config.get("optim") or {}).get("clip_norm") or 0
    if clip and len(norms) >= 20 and (found := statistics.median(norms[-20:])) > look.thresholds.norm_clipped * clip:
        return Alert(
            "gradient norm",
            f"{found:.3g} (median of 20 records), {found / clip:.0f} times optim.clip_norm, to which it is cut",
            "if the loss falls well, raise optim.clip_norm towards the usual norm; otherwise lower optim.lr or give it "
            "a longer warm-up",
        )
    return None
