"""Alerts from the curves of a run: losses, gradient norms and skipped steps."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from mmldlm.tools.history.run_history import CURVE_KINDS
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot, finite_values

_BLOCK = 10  # records per median, so that one unusual batch raises no alert
_MIN_SIGMAS = 4.0  # by which two such medians must differ
_OVERFLOW_WINDOW = 200  # steps

_REASONS = {
    "loss": "the loss was not finite",
    "norm": "the gradients were not finite",
    "spike": "the gradient norm was a spike",
}


def skipped_steps(snapshot: Snapshot) -> Alert | None:
    """Alert on recently skipped steps, except for fp16 overflows, which have an alert of their own."""
    step = snapshot.history.step
    window = snapshot.thresholds.skip_steps
    recent = [record for record in snapshot.history.by_kind("skip") if record["step"] > step - window]
    skips = [record for record in recent if record.get("reason") != "overflow"]
    if not skips:
        return None
    reasons = Counter(_REASONS.get(record.get("reason", ""), "unknown reason") for record in skips)
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    latest = ", ".join(str(record["step"]) for record in skips[-3:])
    return Alert(
        "skipped steps",
        f"{len(skips)} of the last {min(step, window)} steps were skipped: {why}; the latest: {latest}",
        "skipped_steps.jsonl in the run folder names their samples: `mmldlm data verify` the store if the same samples "
        "recur, lower optim.lr if they differ each time; guard.* sets when the run gives up",
    )


def fp16_overflow(snapshot: Snapshot) -> Alert | None:
    """Alert if fp16 keeps losing steps, beyond those in which its loss scale comes down after the start."""
    step = snapshot.history.step
    skips = [record for record in snapshot.history.by_kind("skip") if record.get("reason") == "overflow"]
    recent = [record for record in skips if record["step"] > step - _OVERFLOW_WINDOW]
    if step < _OVERFLOW_WINDOW or len(recent) <= snapshot.thresholds.overflow_share * _OVERFLOW_WINDOW:
        return None
    return Alert(
        "overflow",
        f"fp16 overflowed in {len(recent)} of the last {_OVERFLOW_WINDOW} steps",
        "use precision=bf16 if the device supports it; otherwise lower optim.lr",
    )


def nonfinite_loss(snapshot: Snapshot) -> Alert | None:
    """Alert if the latest value of a loss is NaN or infinite. Gradient norms do not count: such steps are skipped."""
    for kind in CURVE_KINDS:
        latest = snapshot.history.last(kind) or {}
        losses = [tag for tag in latest.get("nonfinite") or [] if tag.startswith(("loss/", "validation/"))]
        if losses:
            return Alert(
                "not finite",
                f"{', '.join(losses[:3])} at step {latest['step']}",
                "go back to a checkpoint before that step (resume=PATH) with a lower optim.lr",
            )
    return None


def rising_loss(snapshot: Snapshot) -> Alert | None:
    """Alert if the run has diverged, the training loss rises, or the validation loss rises.

    The run has diverged if the loss is above its initial value. The training loss rises if it is above its minimum by
    more than chance and `thresholds.rise`. The validation loss rises if each of the last three validations was worse
    than the one before.
    """
    return _diverged(snapshot) or _rising_training(snapshot) or _rising_validation(snapshot)


def _diverged(snapshot: Snapshot) -> Alert | None:
    losses = finite_values(snapshot.train_records, "loss/total")
    recent = losses[3:][-_BLOCK:]
    if len(recent) < _BLOCK:
        return None
    initial, loss = max(losses[:3]), statistics.median(recent)
    if loss <= initial + snapshot.thresholds.diverged * abs(initial):
        return None
    return Alert(
        "rising loss",
        f"loss/total is {loss:.4g} (median of {_BLOCK} records), more than at the start ({initial:.4g})",
        "the run has diverged and will not recover: start again with a lower optim.lr or a longer optim.warmup_steps",
    )


def _rising_training(snapshot: Snapshot) -> Alert | None:
    losses = finite_values(snapshot.train_records, "loss/total")
    blocks = [losses[end - _BLOCK : end] for end in range(len(losses), _BLOCK - 1, -_BLOCK)]  # latest first
    if len(blocks) < 3:
        return None
    medians = [statistics.median(block) for block in blocks]
    deviation = statistics.median(abs(value - medians[i]) for i, block in enumerate(blocks[:10]) for value in block)
    # Standard deviation of the difference of two medians of `_BLOCK` normal values: 1.4826 converts a median absolute
    # deviation to a standard deviation, 1.2533 = sqrt(pi / 2) is the standard error of a median relative to the mean's.
    std = math.sqrt(2) * 1.2533 * 1.4826 * deviation / math.sqrt(_BLOCK)
    lowest = min(medians[1:])
    if medians[0] - lowest <= max(_MIN_SIGMAS * std, snapshot.thresholds.rise * abs(lowest)):
        return None
    return Alert(
        "rising loss",
        f"loss/total is {medians[0]:.4g} (median of {_BLOCK} records) and was {lowest:.4g}",
        "optim.lr is too high, or its warm-up too short: go back to an earlier checkpoint (resume=PATH) with a lower "
        "optim.lr; if mode_schedule or train.batch_schedule has just changed what is measured, wait",
    )


def _rising_validation(snapshot: Snapshot) -> Alert | None:
    losses = snapshot.history.series("validation/total", "validation").values
    if len(losses) < 4 or not all(map(math.isfinite, losses)):
        return None
    lowest, recent = min(losses), losses[-4:]
    limit = lowest + snapshot.thresholds.validation_rise * abs(lowest)
    if min(recent[1:]) <= limit or any(later <= earlier for earlier, later in pairwise(recent)):
        return None
    return Alert(
        "rising loss",
        f"validation/total rose three times in a row, to {losses[-1]:.4g}; its lowest was {lowest:.4g}",
        "if loss/total still falls, the model overfits: stop here and use the best checkpoint "
        "(checkpoint.keep_best), or use more data or a smaller model; if it rises too, lower optim.lr",
    )


def plateau(snapshot: Snapshot) -> Alert | None:
    """Alert if the loss fell by less than `thresholds.flat` in the last quarter of the steps, beyond chance.

    Raised only while the learning rate is above a third of its peak: at the end of a schedule a plateau is expected.
    """
    rates = finite_values(snapshot.train_records, "optim/lr")
    if not rates or rates[-1] < max(rates) / 3 or rising_loss(snapshot):
        return None
    series = snapshot.history.series("validation/total", "validation")
    tag = "validation/total"
    if len(series.steps) < 8:
        series, tag = snapshot.history.series("loss/total", "train"), "loss/total"
    last = series.steps[-1] if series.steps else 0
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    before = [value for step, value in points if last / 2 < step <= last * 3 / 4]
    recent = [value for step, value in points if step > last * 3 / 4]
    if min(len(before), len(recent)) < (2 if tag.startswith("validation") else 2 * _BLOCK):
        return None
    fall = statistics.fmean(before) - statistics.fmean(recent)
    margin = 2 * math.hypot(_standard_error(before), _standard_error(recent))
    if fall + margin >= snapshot.thresholds.flat * abs(statistics.fmean(before)):
        return None
    return Alert(
        "plateau",
        f"{tag} fell by {fall:.2g} in the last quarter of the steps, and is {statistics.fmean(recent):.4g}",
        "schedule.lr=plateau or a lower optim.lr may reduce it further; if it never fell, optim.lr is too low or too "
        "high, or the wrong parts are frozen",
    )


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; a trend within `values` counts as noise."""
    return statistics.stdev(values) / math.sqrt(len(values))


def gradient_norm(snapshot: Snapshot) -> Alert | None:
    """Alert if the gradient norm has jumped, or is so large that clipping leaves little of it."""
    norms = finite_values(snapshot.train_records, "optim/grad_norm")
    recent, before = norms[-5:], norms[-105:-5]
    if len(before) >= 20:
        usual, norm = statistics.median(before), statistics.median(recent)
        if norm > snapshot.thresholds.norm_jump * usual:
            return Alert(
                "gradient norm",
                f"{norm:.3g} (median of 5 records), before {usual:.3g}",
                "if the loss rises too, go back to an earlier checkpoint (resume=PATH) with a lower optim.lr; "
                "guard.grad_norm_spike skips such steps",
            )
    clip = (snapshot.history.config.get("optim") or {}).get("clip_norm") or 0
    if clip and len(norms) >= 20 and (norm := statistics.median(norms[-20:])) > snapshot.thresholds.norm_clipped * clip:
        return Alert(
            "gradient norm",
            f"{norm:.3g} (median of 20 records), {norm / clip:.0f} times optim.clip_norm, to which it is clipped",
            "if the loss falls well, raise optim.clip_norm towards the usual norm; otherwise lower optim.lr or give it "
            "a longer warm-up",
        )
    return None
