"""All alerts in one table: name, condition and advice. docs/review.md explains each of them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from mmldlm.errors import ExitCode
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.records import Record
from mmldlm.tools.run_history import CURVE_KINDS
from mmldlm.utils.format import human_duration
from mmldlm.utils.nested import flatten

_GIB = 2**30
_BLOCK = 10  # records per median, so that one unusual batch raises no alert
_MIN_SIGMAS = 4.0  # by which two such medians must differ
_MIN_EARLIER = 20  # records that recent ones are compared with
_OVERFLOW_WINDOW = 200  # steps
_MIN_STEPS_PER_SPEED = 10
_NUM_SPEEDS = 10  # speeds that are compared
_MAX_NAMES = 4  # ranks that an alert names

_SKIP_REASONS = {
    "loss": "the loss was not finite",
    "norm": "the gradients were not finite",
    "spike": "the gradient norm was a spike",
}


@dataclass(frozen=True)
class Alert:
    """A condition of a run that needs attention: `found` is the observation, `advice` what to do about it."""

    name: str
    found: str
    advice: str


Condition = Callable[[Snapshot], str | None]  # returns the observation if the alert is raised, otherwise None
Advice = str | Callable[[Snapshot], str]  # a function if it depends on the run


def alerts(snapshot: Snapshot) -> list[Alert]:
    """Return the alerts of a run, the most urgent first; none if it has finished, or was stopped and saved."""
    if snapshot.state.name in ("finished", "stopped"):
        return []
    raised: dict[str, Alert] = {}
    for name, condition, advice in ALERTS + ALERTS_OF_ACTIVE_RUNS if snapshot.state.is_active else ALERTS:
        if name not in raised and (observation := condition(snapshot)) is not None:
            raised[name] = Alert(name, observation, advice if isinstance(advice, str) else advice(snapshot))
    return list(raised.values())


# --- end of the run and its processes ---------------------------------------------------------------------------


def _killed(snapshot: Snapshot) -> str | None:
    return snapshot.state.cause if snapshot.state.name == "killed" else None


def _failed(snapshot: Snapshot) -> str | None:
    state = snapshot.state
    if state.name != "failed":
        return None
    return state.cause if state.code is None else f"exit code {state.code}: {state.cause}"


def _advice_for_exit_code(snapshot: Snapshot) -> str:
    resume = "the same command continues from the last checkpoint"
    advice: dict[int | None, str] = {
        ExitCode.CONFIG: "fix the setting that is named",
        ExitCode.DATA: "fix or remove what is named: `mmldlm data verify` checks a store",
        ExitCode.NUMERICAL: "skipped_steps.jsonl names the samples; continue with a lower optim.lr, or without them",
        ExitCode.STORAGE: f"make room on the disk, or repair it; then {resume}",
        ExitCode.PEER_LOST: f"stacks.rank*.txt in the run folder says where each rank was; {resume}",
        ExitCode.INTERRUPTED: resume,
    }
    return advice.get(snapshot.state.code, f"the traceback is in the run's output; once that is fixed, {resume}")


def _rank_gone(snapshot: Snapshot) -> str | None:
    """Return which ranks of an active run have no process on this machine any more."""
    # Without rank 0: a run whose rank 0 is gone counts as killed.
    gone = [process for process in snapshot.history.processes[1:] if process.state() == "gone"]
    if not gone or not snapshot.state.is_active:
        return None
    names = ", ".join(f"rank {process.rank} (process {process.pid})" for process in gone)
    return f"gone from {gone[0].host}: {names}"


def _rank_failed(snapshot: Snapshot) -> str | None:
    """Return the rank that ended first, if other ranks ended because they lost it."""
    failed = [report for report in snapshot.history.exits if not report.is_clean]
    # Without a rank that lost a peer, all ranks ended with an error of their own, such as a wrong setting.
    if all(report.code != ExitCode.PEER_LOST for report in failed):
        return None
    first = next((report for report in failed if report.code != ExitCode.PEER_LOST), failed[0])
    return f"rank {first.rank} ended at step {first.step} with exit code {first.code}: {first.cause}"


def _stopped_pids(snapshot: Snapshot) -> str:
    return " ".join(str(process.pid) for process in snapshot.history.processes if process.state() == "stopped")


def _process_stopped(snapshot: Snapshot) -> str | None:
    silence, pids = _no_news(snapshot), _stopped_pids(snapshot)
    return f"{silence}; stopped by a signal: process {pids}" if silence and pids else None


def _no_news(snapshot: Snapshot) -> str | None:
    """Return how long an active run has written nothing, if that is longer than `snapshot.stall_timeout_s`."""
    if snapshot.state.name != "silent":
        return None
    latest, step_s = snapshot.history.last(), snapshot.history.step_s
    assert latest is not None and snapshot.news_age_s is not None
    activity = f" while {latest['what']}" if latest["kind"] == "heartbeat" else ""
    usual = f"; a step usually takes {human_duration(step_s) if step_s >= 10 else f'{step_s:.2g}s'}" if step_s else ""
    return f"for {human_duration(snapshot.news_age_s)}, since step {latest['step']}{activity}{usual}"


def _advice_for_silence(snapshot: Snapshot) -> str:
    processes = snapshot.history.processes
    dump = f"`py-spy dump --pid {processes[0].pid}` on {processes[0].host}" if processes else "`py-spy dump --pid PID`"
    return (
        f"{dump} shows where it hangs; a run of several ranks ends after distributed.timeout_s, a run of one rank by "
        "`kill`; then the same command continues from the last checkpoint"
    )


def _tracker_error(snapshot: Snapshot) -> str | None:
    """Return what keeps a tracker from getting the records."""
    for path in sorted(snapshot.history.run_dir.glob("trackers/*/error.txt")):
        with suppress(OSError):  # the tracker may just be back
            return path.read_text(encoding="utf-8").partition("\n")[0]
    return None


# --- losses and gradients ---------------------------------------------------------------------------------------


def _nonfinite_loss(snapshot: Snapshot) -> str | None:
    """Return the losses that are NaN or infinite. Gradient norms do not count: such steps are skipped."""
    for kind in CURVE_KINDS:
        latest = snapshot.history.last(kind) or {}
        losses = [tag for tag in latest.get("nonfinite", []) if tag.startswith(("loss/", "validation/"))]
        if losses:
            return f"{', '.join(losses[:3])} at step {latest['step']}"
    return None


def _recent_skips(snapshot: Snapshot, window: int, overflow: bool) -> list[Record]:
    """Return the steps skipped within the last `window` steps, either by fp16 overflows or for another reason."""
    skips = [record for record in snapshot.history.by_kind("skip") if record["step"] > snapshot.history.step - window]
    return [record for record in skips if (record.get("reason") == "overflow") == overflow]


def _skipped_steps(snapshot: Snapshot) -> str | None:
    window = snapshot.thresholds.skip_steps
    skips = _recent_skips(snapshot, window, overflow=False)
    if not skips:
        return None
    reasons = Counter(_SKIP_REASONS.get(record.get("reason", ""), "unknown reason") for record in skips)
    why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    latest = ", ".join(str(record["step"]) for record in skips[-3:])
    num_steps = min(snapshot.history.step, window)
    return f"{len(skips)} of the last {num_steps} steps were skipped: {why}; the latest: {latest}"


def _fp16_overflow(snapshot: Snapshot) -> str | None:
    """Return how many steps overflowed, beyond those in which the loss scale comes down after the start."""
    count = len(_recent_skips(snapshot, _OVERFLOW_WINDOW, overflow=True))
    limit = snapshot.thresholds.overflow_share * _OVERFLOW_WINDOW
    if snapshot.history.step < _OVERFLOW_WINDOW or count <= limit:
        return None
    return f"fp16 overflowed in {count} of the last {_OVERFLOW_WINDOW} steps"


def _diverged(snapshot: Snapshot) -> str | None:
    """Return the training loss if it is above its initial value."""
    losses = snapshot.history.finite("loss/total")
    # The first three records are the initial loss, which `recent` must not contain.
    recent = losses[3:][-_BLOCK:]
    if len(recent) < _BLOCK:
        return None
    initial, loss = max(losses[:3]), statistics.median(recent)
    if loss <= initial + snapshot.thresholds.diverged * abs(initial):
        return None
    return f"loss/total is {loss:.4g} (median of {_BLOCK} records), more than at the start ({initial:.4g})"


def _rising_training_loss(snapshot: Snapshot) -> str | None:
    """Return the training loss if it is above its minimum by more than chance and `thresholds.rise`."""
    losses = snapshot.history.finite("loss/total")
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
    return f"loss/total is {medians[0]:.4g} (median of {_BLOCK} records) and was {lowest:.4g}"


def _rising_validation_loss(snapshot: Snapshot) -> str | None:
    """Return the validation loss if each of the last three validations was worse than the one before."""
    losses = snapshot.history.series("validation/total", "validation").values
    if len(losses) < 4 or not all(map(math.isfinite, losses)):
        return None
    lowest, recent = min(losses), losses[-4:]
    limit = lowest + snapshot.thresholds.validation_rise * abs(lowest)
    if min(recent[1:]) <= limit or any(later <= earlier for earlier, later in pairwise(recent)):
        return None
    return f"validation/total rose three times in a row, to {losses[-1]:.4g}; its lowest was {lowest:.4g}"


_LOSS_RISES = (_diverged, _rising_training_loss, _rising_validation_loss)


def _norm_jump(snapshot: Snapshot) -> str | None:
    medians = _recent_and_earlier_median(snapshot.history.finite("optim/grad_norm")[-105:], 5)
    if medians is None or medians[0] <= snapshot.thresholds.norm_jump * medians[1]:
        return None
    return f"{medians[0]:.3g} (median of 5 records), before {medians[1]:.3g}"


def _norm_clipped(snapshot: Snapshot) -> str | None:
    """Return the gradient norm if it is so large that clipping leaves little of it."""
    norms = snapshot.history.finite("optim/grad_norm")[-20:]
    clip = flatten(snapshot.history.config).get("optim.clip_norm")
    if not isinstance(clip, int | float) or not clip or len(norms) < 20:
        return None
    if (norm := statistics.median(norms)) <= snapshot.thresholds.norm_clipped * clip:
        return None
    return f"{norm:.3g} (median of 20 records), {norm / clip:.0f} times optim.clip_norm, to which it is clipped"


def _plateau(snapshot: Snapshot) -> str | None:
    """Return the loss if it fell by less than `thresholds.flat` in the last quarter of the steps, beyond chance.

    Only while the learning rate is above a third of its peak: at the end of a schedule a plateau is expected.
    """
    rates = snapshot.history.finite("optim/lr")
    if not rates or rates[-1] < max(rates) / 3 or any(rise(snapshot) for rise in _LOSS_RISES):
        return None
    series, tag, min_points = snapshot.history.series("validation/total", "validation"), "validation/total", 2
    if len(series.steps) < 8:
        series, tag, min_points = snapshot.history.series("loss/total", "train"), "loss/total", 2 * _BLOCK
    last = series.steps[-1] if series.steps else 0
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    before = [value for step, value in points if last / 2 < step <= last * 3 / 4]
    recent = [value for step, value in points if step > last * 3 / 4]
    if min(len(before), len(recent)) < min_points:
        return None
    fall = statistics.fmean(before) - statistics.fmean(recent)
    margin = 2 * math.hypot(_standard_error(before), _standard_error(recent))
    if fall + margin >= snapshot.thresholds.flat * abs(statistics.fmean(before)):
        return None
    return f"{tag} fell by {fall:.2g} in the last quarter of the steps, and is {statistics.fmean(recent):.4g}"


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; a trend within `values` counts as noise."""
    return statistics.stdev(values) / math.sqrt(len(values))


# --- speed and resources ----------------------------------------------------------------------------------------


def _memory(snapshot: Snapshot) -> str | None:
    """Return the use of the first of device and host that has almost no memory left."""
    for name, used, limit in snapshot.memory:
        if used > snapshot.thresholds.memory * limit:
            return f"{used / 1024:.1f} of {limit / 1024:.1f} GiB of the {name} are used"
    return None


def _disk(snapshot: Snapshot) -> str | None:
    """Return the free space if it has no room for the next checkpoints."""
    thresholds, free, checkpoint = snapshot.thresholds, snapshot.disk_free_bytes, snapshot.checkpoint_bytes
    if free >= max(thresholds.disk_gib * _GIB, thresholds.disk_checkpoints * checkpoint):
        return None
    folder = snapshot.history.run_dir
    return f"{free / _GIB:.2g} GiB are free for {folder}; a checkpoint takes {checkpoint / _GIB:.2g} GiB"


def _mirror(snapshot: Snapshot) -> str | None:
    """Return why the newest checkpoints are not in the mirror."""
    attempt, copied = snapshot.history.last("mirror"), snapshot.history.by_kind("mirror")
    if not flatten(snapshot.history.config).get("checkpoint.mirror"):
        return None
    if attempt is not None and "error" in attempt:
        return f"not copied at step {attempt['step']}: {attempt['error']}"
    step = max((record["step"] for record in copied if "error" not in record), default=0)
    missing = [record for record in snapshot.history.by_kind("checkpoint") if record["step"] > step]
    if len(missing) <= snapshot.thresholds.mirror_checkpoints:
        return None
    return f"{len(missing)} checkpoints are newer than the newest copy, of step {step}"


def _data_bound(snapshot: Snapshot) -> str | None:
    share = snapshot.data_wait_share
    if share is None or share <= snapshot.thresholds.data_wait:
        return None
    return f"{share:.0%} of a step is waiting for data"


def _recent_and_earlier_median(values: Sequence[float], recent: int) -> tuple[float, float] | None:
    """Return the medians of the last `recent` values and of those before; None while there are few of those."""
    earlier = values[:-recent]
    return (statistics.median(values[-recent:]), statistics.median(earlier)) if len(earlier) >= _MIN_EARLIER else None


def _slowdown(snapshot: Snapshot) -> str | None:
    speeds = _recent_and_earlier_median(snapshot.history.finite("speed/tokens_per_s", session=True), 10)
    if speeds is None or speeds[0] >= snapshot.thresholds.speed_drop * speeds[1]:
        return None
    return f"{speeds[0]:.0f} tokens/s (median of 10 records), before {speeds[1]:.0f}"


def _busy_cores(snapshot: Snapshot) -> str | None:
    slowdown = _slowdown(snapshot)
    cores = _recent_and_earlier_median(snapshot.history.finite("speed/cores_of_others", session=True), 10)
    if slowdown is None or cores is None or cores[0] - cores[1] < snapshot.thresholds.cores_of_others:
        return None
    return f"{slowdown}; other processes keep {cores[0]:.1f} cores of this host busy, before {cores[1]:.1f}"


def _low_speed(snapshot: Snapshot) -> str | None:
    return None if _busy_cores(snapshot) else _slowdown(snapshot)


def _slow_ranks(snapshot: Snapshot) -> str | None:
    latest = {record["rank"]: record for record in snapshot.history.session("slow_rank")}
    slow = sorted((record for record in latest.values() if record["slow"]), key=lambda record: -record["slowdown"])
    if not slow:
        return None
    names = [
        f"rank {record['rank']} on {record['host']} ({record['slowdown']:.0%}, since step {record['step']})"
        for record in slow[:_MAX_NAMES]
    ]
    more = f" and {len(slow) - _MAX_NAMES} more" if len(slow) > _MAX_NAMES else ""
    return f"slower than the median of the other ranks, which wait: {', '.join(names)}{more}"


def _unstable_speed(snapshot: Snapshot) -> str | None:
    """Return the range of speeds if it is wide, although each speed is over at least 10 steps."""
    steps_per_record = snapshot.history.steps_per_record
    records_per_speed = max(1, math.ceil(_MIN_STEPS_PER_SPEED / steps_per_record))
    num_records = _NUM_SPEEDS * records_per_speed
    records = snapshot.session_records[-num_records:]
    if len(records) < num_records:
        return None
    starts = range(0, num_records, records_per_speed)
    speeds = sorted(_tokens_per_s(records[i : i + records_per_speed]) for i in starts)
    # Without the lowest and the highest, so that one pause raises no alert.
    low, high, median = speeds[1], speeds[-2], statistics.median(speeds)
    if high - low <= snapshot.thresholds.speed_spread * median:
        return None
    return f"{low:.0f} to {high:.0f} tokens/s over {records_per_speed * steps_per_record} steps each"


def _tokens_per_s(records: Sequence[Record]) -> float:
    """Return the tokens per second over all of these training records."""
    tags = "speed/tokens_per_s", "speed/step_s"
    rows = ([record.get(tag) or math.nan for tag in tags] for record in records)
    pairs = [row for row in rows if math.isfinite(sum(row))]
    # Tokens of an average step of each record: the records have equally many steps.
    return sum(speed * step_s for speed, step_s in pairs) / max(sum(step_s for _, step_s in pairs), 1e-9)


# (name, condition, advice), the most urgent first. Of several rows with one name, the first whose condition holds
# raises the alert. These are also raised for runs that ended with an error, where they show the cause.
ALERTS: tuple[tuple[str, Condition, Advice], ...] = (
    (
        "killed",
        _killed,
        "`dmesg` or the scheduler's log says whether memory or a time limit was the reason; the same command continues "
        "from the last checkpoint",
    ),
    ("failed", _failed, _advice_for_exit_code),
    (
        "rank lost",
        _rank_gone,
        "the other ranks end as soon as they notice it, within distributed.timeout_s; then the same command continues "
        "from the last checkpoint",
    ),
    (
        "rank lost",
        _rank_failed,
        "look at that rank first: its node's log, stacks.rank*.txt, `mmldlm doctor` on its node; the other ranks ended "
        "because of it",
    ),
    ("not finite", _nonfinite_loss, "go back to a checkpoint before that step (resume=PATH) with a lower optim.lr"),
    (
        "skipped steps",
        _skipped_steps,
        "skipped_steps.jsonl in the run folder names their samples: `mmldlm data verify` the store if the same samples "
        "recur, lower optim.lr if they differ each time; guard.* sets when the run gives up",
    ),
    ("overflow", _fp16_overflow, "use precision=bf16 if the device supports it; otherwise lower optim.lr"),
    (
        "rising loss",
        _diverged,
        "the run has diverged and will not recover: start again with a lower optim.lr or a longer optim.warmup_steps",
    ),
    (
        "rising loss",
        _rising_training_loss,
        "optim.lr is too high, or its warm-up too short: go back to an earlier checkpoint (resume=PATH) with a lower "
        "optim.lr; if mode_schedule or train.batch_schedule has just changed what is measured, wait",
    ),
    (
        "rising loss",
        _rising_validation_loss,
        "if loss/total still falls, the model overfits: stop here and use the best checkpoint (checkpoint.keep_best), "
        "or use more data or a smaller model; if it rises too, lower optim.lr",
    ),
    (
        "gradient norm",
        _norm_jump,
        "if the loss rises too, go back to an earlier checkpoint (resume=PATH) with a lower optim.lr; "
        "guard.grad_norm_spike skips such steps",
    ),
    (
        "gradient norm",
        _norm_clipped,
        "if the loss falls well, raise optim.clip_norm towards the usual norm; otherwise lower optim.lr or give it a "
        "longer warm-up",
    ),
    (
        "memory",
        _memory,
        "a smaller train.micro_batch_size or micro_batch_tokens at the same global_batch_size, "
        "train.auto_micro_batch=true or memory.activation_checkpointing; on the host, fewer data.num_workers",
    ),
    (
        "disk",
        _disk,
        "make room, or keep fewer checkpoints (checkpoint.keep_last); a run that cannot save ends with exit code 74",
    ),
    (
        "mirror",
        _mirror,
        "repair what is named (credentials, space, network): the run tries again by itself, and training goes on; if "
        "copies are only slow, save less often, or raise checkpoint.keep_last",
    ),
)

ALERTS_OF_ACTIVE_RUNS: tuple[tuple[str, Condition, Advice], ...] = (
    ("no news", _process_stopped, lambda snapshot: f"`kill -CONT {_stopped_pids(snapshot)}` lets it continue"),
    ("no news", _no_news, _advice_for_silence),
    (
        "slow rank",
        _slow_ranks,
        "look at that host for another process or a hot or throttled GPU (`nvidia-smi -q -d PERFORMANCE`); without it, "
        "or on another host, the run is faster by as much",
    ),
    ("data-bound", _data_bound, "raise data.num_workers or data.prefetch_factor, or put the store on a local disk"),
    (
        "busy cores",
        _busy_cores,
        "end them; if they have to stay, stop the run and start it again with OMP_NUM_THREADS set to the cores that "
        "they leave free, at least 1: the same command continues it",
    ),
    (
        "low speed",
        _low_speed,
        "look for another job on this machine, a hot or throttled GPU (`nvidia-smi -q -d PERFORMANCE`), a slow node or "
        "disk; scripts/launch_node.sh ... --check measures the network",
    ),
    (
        "unstable speed",
        _unstable_speed,
        "does another job use this machine, its disk or network? A trace (profile.steps=[FIRST,LAST]) shows which "
        "operations vary; if data_wait varies too, see data-bound",
    ),
    (
        "plateau",
        _plateau,
        "schedule.lr=plateau or a lower optim.lr may reduce it further; if it never fell, optim.lr is too low or too "
        "high, or the wrong parts are frozen",
    ),
    (
        "tracker",
        _tracker_error,
        "the training does not depend on it, and the tracker gets the records of the next start: trackers/NAME in the "
        "run folder has the details",
    ),
)
