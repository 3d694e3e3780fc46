"""All alerts: when each one is raised, and what to do about it."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from mmldlm.errors import ExitCode
from mmldlm.tools.monitor.snapshot import SILENT_STEPS, Snapshot, Thresholds
from mmldlm.utils.files import read_regular
from mmldlm.utils.format import human_duration

_GIB = 2**30
_DEFAULTS = Thresholds()
_BLOCK = 10  # records per median, so that one unusual batch raises no alert
_MIN_EARLIER = 20  # fewest earlier records to compare recent ones with
_MAX_EARLIER = 1000


@dataclass(frozen=True)
class Alert:
    """A condition of a run that needs attention: `found` says what was observed, `advice` how to react."""

    name: str
    found: str
    advice: str


@dataclass(frozen=True)
class Rule:
    """A rule for an alert. `find` returns a description of the problem, or None if all is well."""

    name: str
    when: str
    advice: str
    find: Callable[[Snapshot], str | None]
    only_active: bool
    also_ended: bool  # also applies to a run that finished, or was stopped and saved


RULES: list[Rule] = []  # in the order of this file: the most urgent first


def _rule(
    name: str, when: str, advice: str, only_active: bool = False, also_ended: bool = False
) -> Callable[[Callable[[Snapshot], str | None]], None]:
    """Register the decorated function as the rule of an alert."""
    return lambda find: RULES.append(Rule(name, when, advice, find, only_active, also_ended))


def alerts(run: Snapshot) -> list[Alert]:
    """Return the alerts of a run, the most urgent first."""
    rules = [rule for rule in RULES if run.state.is_active or not rule.only_active]
    if run.state.name in ("finished", "stopped"):
        rules = [rule for rule in RULES if rule.also_ended]
    return [Alert(rule.name, found, rule.advice) for rule in rules if (found := rule.find(run)) is not None]


def alert_table() -> str:
    """Return the table of docs/review.md."""
    rows = [f"| {rule.name} | {rule.when} | {rule.advice} |" for rule in RULES]
    return "\n".join(["| alert | raised when | what to do |", "|---|---|---|", *rows, ""])


def _recent_and_earlier(values: Sequence[float], count: int) -> tuple[float, float] | None:
    """Return the median of the last `count` values and the median of the earlier ones, or None if there are too few."""
    if len(values) < count + _MIN_EARLIER:
        return None
    return statistics.median(values[-count:]), statistics.median(values[:-count])


# --- end of the run and its processes ---------------------------------------------------------------------------


@_rule(
    "killed",
    "The run's process is gone from this machine and has left no `exit.json`.",
    "`dmesg` or the scheduler's log (`sacct -j JOB`) says whether memory or a time limit was the reason; the same "
    "command continues from the last checkpoint",
)
def _killed(run: Snapshot) -> str | None:
    return run.state.cause if run.state.name == "killed" else None


@_rule(
    "failed",
    "The run has ended with an error. Its exit code and cause are quoted.",
    "fix what is named: after 64 the setting, after 65 the data, after 74 the disk, after 70 the samples in "
    "skipped_steps.jsonl or optim.lr, after 76 what stacks.rank*.txt shows, after 1 what the traceback in the run's "
    "output says; then the same command continues from the last checkpoint",
)
def _failed(run: Snapshot) -> str | None:
    state = run.state
    if state.name != "failed":
        return None
    return state.cause if state.code is None else f"exit code {state.code}: {state.cause}"


@_rule(
    "rank lost",
    "A rank has ended and the others because of it, or its process is gone and the others will end soon.",
    "look at that rank first: its node's log, stacks.rank*.txt in the run folder, `mmldlm train --check` on its node; "
    "then the same command continues from the last checkpoint",
)
def _rank_lost(run: Snapshot) -> str | None:
    # We leave rank 0 out: without it, the whole run counts as killed.
    gone = [process for process in run.history.processes[1:] if process.state() == "gone"]
    if gone and run.state.is_active:
        return f"gone from {gone[0].host}: {', '.join(f'rank {one.rank} (process {one.pid})' for one in gone)}"
    failed = [report for report in run.history.exits if not report.is_clean]
    # If no rank lost a peer, every rank failed by itself, e.g. because of a wrong setting.
    if all(report.code != ExitCode.PEER_LOST for report in failed):
        return None
    first = next((report for report in failed if report.code != ExitCode.PEER_LOST), failed[0])
    return f"rank {first.rank} ended at step {first.step} with exit code {first.code}: {first.cause}"


@_rule(
    "no news",
    f"There is no record for {SILENT_STEPS} typical steps, at least the time of two records, plus `--interval`. "
    f"Validations and saves may take {SILENT_STEPS} times their usual duration, a start "
    f"{human_duration(_DEFAULTS.silent_s)}. If a process on this machine is stopped (Ctrl-Z, a debugger, a scheduler), "
    f"{SILENT_STEPS} steps are enough.",
    "`kill -CONT PID` lets a stopped process continue, `py-spy dump --pid PID` shows where another one hangs; several "
    "ranks end after distributed.timeout_s, one by `kill`; then the same command continues from the last checkpoint",
)
def _no_news(run: Snapshot) -> str | None:
    history, latest, step_s = run.history, run.history.last(), run.history.step_s
    if run.state.name != "silent" or latest is None or run.news_age_s is None:
        return None
    found = f"for {human_duration(run.news_age_s)}, since step {latest['step']}"
    if latest["kind"] == "heartbeat":
        found += f" while {latest['what']}"
    if step_s:
        found += f"; a step usually takes {human_duration(step_s) if step_s >= 10 else f'{step_s:.2g}s'}"
    stopped = [str(process.pid) for process in history.processes if process.state() == "stopped"]
    if stopped:
        return f"{found}; stopped by a signal: process {' '.join(stopped)}"
    return found + "".join(f"; process {process.pid} on {process.host}" for process in history.processes[:1])


# --- losses and gradients ---------------------------------------------------------------------------------------


@_rule(
    "not finite",
    "A loss of the latest record or validation is NaN or infinite. Steps with such gradients are skipped, so it comes "
    "from a validation, or from weights that are already damaged.",
    "go back to a checkpoint before that step (resume=PATH) with a lower optim.lr",
)
def _not_finite(run: Snapshot) -> str | None:
    for latest in filter(None, map(run.history.last, ("train", "validation"))):
        losses = [tag for tag in latest.get("nonfinite", []) if tag.startswith(("loss/", "validation/"))]
        if losses:
            return f"{', '.join(losses[:3])} at step {latest['step']}"
    return None


_SKIP_STEPS, _OVERFLOW_STEPS, _OVERFLOW_SHARE = 100, 200, 0.05
_SKIP_REASONS = {
    "loss": "the loss was not finite",
    "norm": "the gradients were not finite",
    "spike": "the gradient norm was a spike",
}


@_rule(
    "skipped steps",
    f"Any of the last {_SKIP_STEPS} steps was skipped, or fp16 overflowed in more than {_OVERFLOW_SHARE:.0%} of the "
    f"last {_OVERFLOW_STEPS} steps. A few overflows after the start find the loss scale.",
    "skipped_steps.jsonl names their samples: look at these (`mmldlm data verify`) if they recur, otherwise lower "
    "optim.lr or lengthen its warm-up; for overflows use precision=bf16; guard.* sets when the run gives up",
)
def _skipped_steps(run: Snapshot) -> str | None:
    step, skips = run.history.step, run.history.after(run.history.step - _OVERFLOW_STEPS, "skip")
    overflows = sum(skip.get("reason") == "overflow" for skip in skips)
    others = [skip for skip in skips if skip.get("reason") != "overflow" and skip["step"] > step - _SKIP_STEPS]
    if others:
        reasons = Counter(_SKIP_REASONS.get(skip.get("reason", ""), "unknown reason") for skip in others)
        why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        latest = ", ".join(str(skip["step"]) for skip in others[-3:])
        return f"{len(others)} of the last {min(step, _SKIP_STEPS)} steps: {why}; the latest: {latest}"
    if step >= _OVERFLOW_STEPS and overflows > _OVERFLOW_SHARE * _OVERFLOW_STEPS:
        return f"fp16 overflowed in {overflows} of the last {_OVERFLOW_STEPS} steps"
    return None


_RISE, _MIN_SIGMAS = 0.05, 4.0


@_rule(
    "rising loss",
    f"The median training loss of {_BLOCK} records is above the lowest such median of the last {_MAX_EARLIER:,} "
    f"records, by {_RISE:.0%} and by more than chance. A change of mode_schedule or train.batch_schedule also changes "
    "what the loss is a mean of.",
    "go back to an earlier checkpoint (resume=PATH), or to the start, with a lower optim.lr or a longer "
    "optim.warmup_steps; if a schedule has just changed what is measured, wait",
)
def _rising_training_loss(run: Snapshot) -> str | None:
    losses = run.history.recent("loss/total", _MAX_EARLIER)
    blocks = [losses[end - _BLOCK : end] for end in range(len(losses), _BLOCK - 1, -_BLOCK)]  # the latest first
    if len(blocks) < 3:
        return None
    medians = [statistics.median(block) for block in blocks]
    deviation = statistics.median(abs(value - medians[i]) for i, block in enumerate(blocks[:10]) for value in block)
    # Standard deviation of the difference of two medians, each of `_BLOCK` normal values. 1.4826 converts a median
    # absolute deviation to a standard deviation. 1.2533 = sqrt(pi / 2) is the ratio of a median's to a mean's error.
    std = math.sqrt(2) * 1.2533 * 1.4826 * deviation / math.sqrt(_BLOCK)
    lowest = min(medians[1:])
    if medians[0] - lowest <= max(_MIN_SIGMAS * std, _RISE * abs(lowest)):
        return None
    return f"loss/total is {medians[0]:.4g} (median of {_BLOCK} records) and was {lowest:.4g}"


_VALIDATION_RISE = 0.02


@_rule(
    "rising loss",
    f"Each of the last three validations was worse than the one before, and all {_VALIDATION_RISE:.0%} above the best.",
    "if loss/total still falls, the model overfits: stop here and use the best checkpoint (checkpoint.keep_best), or "
    "use more data or a smaller model; if it rises too, lower optim.lr",
)
def _rising_validation_loss(run: Snapshot) -> str | None:
    for metric in ("validation/total", _judged_by(run)):
        losses = run.history.series(metric, "validation").values
        if len(losses) >= 4 and all(map(math.isfinite, losses)):
            lowest, recent = min(losses), losses[-4:]
            limit = lowest + _VALIDATION_RISE * abs(lowest)
            if min(recent[1:]) > limit and all(later > earlier for earlier, later in pairwise(recent)):
                return f"{metric} rose three times in a row, to {losses[-1]:.4g}; its lowest was {lowest:.4g}"
    return None


@_rule(
    "overfitting",
    f"The last validation of a run that has ended is more than {_VALIDATION_RISE:.0%} above the lowest one, by the "
    "loss of texts, or of latents in runs of t2l alone.",
    "sample, evaluate and export the best checkpoint (`--checkpoint`), which checkpoint.keep_best keeps; next time end "
    "such a run early (train.stop_after_worse), or use more data or a smaller model",
    also_ended=True,
)
def _overfitting(run: Snapshot) -> str | None:
    series = run.history.series(metric := _judged_by(run), "validation")
    losses = [loss for loss in series.values if math.isfinite(loss)]
    lowest = min(losses, default=math.inf)
    if run.state.is_active or not losses or losses[-1] <= lowest + _VALIDATION_RISE * abs(lowest):
        return None
    step = series.steps[series.values.index(lowest)]
    return f"{metric} is {losses[-1]:.4g} at the end and was {lowest:.4g} at step {step:,}"


def _judged_by(run: Snapshot) -> str:
    """Return the validation loss that decides which checkpoint is the best (`RunConfig.judged_by`)."""
    return "validation/text" if run.history.series("validation/text", "validation").values else "validation/latent"


_NORM_RECORDS, _NORM_EARLIER, _NORM_JUMP = 5, 100, 5.0


@_rule(
    "gradient norm",
    f"The median norm of {_NORM_RECORDS} records is {_NORM_JUMP:g} times that of the {_NORM_EARLIER} before.",
    "if the loss rises too, go back to an earlier checkpoint (resume=PATH) with a lower optim.lr; "
    "guard.grad_norm_spike skips single such steps",
)
def _norm_jump(run: Snapshot) -> str | None:
    norms = run.history.recent("optim/grad_norm", _NORM_RECORDS + _NORM_EARLIER)
    medians = _recent_and_earlier(norms, _NORM_RECORDS)
    if medians is None or medians[0] <= _NORM_JUMP * medians[1]:
        return None
    return f"{medians[0]:.3g} (median of {_NORM_RECORDS} records), before {medians[1]:.3g}"


# --- resources --------------------------------------------------------------------------------------------------


@_rule(
    "memory",
    f"{_DEFAULTS.memory:.0%} of the device's memory is reserved, or of the host's used (by all processes, within the "
    "limits of the job): a longer batch may not fit.",
    "a smaller train.micro_batch_size or micro_batch_tokens, train.auto_micro_batch=true or "
    "memory.activation_checkpointing, none of which changes the curve; on the host, fewer data.num_workers",
)
def _memory(run: Snapshot) -> str | None:
    for name, used, limit in run.memory:
        if used > run.thresholds.memory * limit:
            return f"{used / 1024:.1f} of {limit / 1024:.1f} GiB of the {name} are used"
    return None


_DISK_CHECKPOINTS = 3


@_rule(
    "disk",
    f"Less than {_DEFAULTS.disk_gib:g} GiB, or less than {_DISK_CHECKPOINTS} checkpoints, are free on the disk of the "
    "run folder.",
    "make room, or keep fewer checkpoints (checkpoint.keep_last); a run that cannot save ends with exit code 74, and "
    "its last checkpoint stays intact",
)
def _disk(run: Snapshot) -> str | None:
    free, checkpoint = run.disk_free_bytes, run.checkpoint_bytes
    if free >= max(run.thresholds.disk_gib * _GIB, _DISK_CHECKPOINTS * checkpoint):
        return None
    return f"{free / _GIB:.2g} GiB are free for {run.history.run_dir}; a checkpoint takes {checkpoint / _GIB:.2g} GiB"


_MIRROR_CHECKPOINTS = 3


@_rule(
    "mirror",
    "The last attempt to copy a checkpoint to checkpoint.mirror has failed, for the reason that is quoted, or more "
    f"than {_MIRROR_CHECKPOINTS} checkpoints are newer than the newest copy.",
    "repair what is named (credentials, space, network): the run tries again by itself, and training goes on; if "
    "copies are only slow, save less often, or raise checkpoint.keep_last",
)
def _mirror(run: Snapshot) -> str | None:
    attempts = run.history.by_kind("mirror")
    if not run.history.config.get("checkpoint.mirror"):
        return None
    if attempts and "error" in attempts[-1]:
        return f"not copied at step {attempts[-1]['step']}: {attempts[-1]['error']}"
    copied = attempts[-1]["step"] if attempts else 0
    missing = len(run.history.after(copied, "checkpoint"))
    if missing <= _MIRROR_CHECKPOINTS:
        return None
    return f"{missing} checkpoints are newer than the newest copy, of step {copied}"


# --- speed ------------------------------------------------------------------------------------------------------

_SLOW_RECORDS, _SLOWDOWN = 5, 0.1


@_rule(
    "slow rank",
    f"In {_SLOW_RECORDS} records in a row one rank, or the ranks of one host, computed at least {_SLOWDOWN:.0%} longer "
    "than the median of the others, which wait for it.",
    "look at that host for another process, a power limit or a hot or throttled GPU (`nvidia-smi -q -d PERFORMANCE`); "
    "without it, or on another host, the run is faster by as much",
    only_active=True,
)
def _slow_ranks(run: Snapshot) -> str | None:
    names = ("speed/slowest_rank", "speed/compute_s_slowest", "speed/compute_s")
    ranks, slowest, others = (run.history.recent(name, _SLOW_RECORDS, session=True) for name in names)
    if not len(ranks) == len(slowest) == len(others) == _SLOW_RECORDS or min(others) <= 0:
        return None
    slowdown = min(time / other - 1 for time, other in zip(slowest, others, strict=True))
    hosts = {number: rank["host"] for number, rank in enumerate(run.history.startup.get("ranks", []))}
    slow_hosts = {hosts.get(int(rank), "an unknown host") for rank in ranks}
    # On one host, noise makes now one rank the slowest and now another.
    is_one = len({*ranks}) == 1 or (len(slow_hosts) == 1 and len({*hosts.values()}) > 1)
    if slowdown < _SLOWDOWN or not is_one:
        return None
    name = " and ".join(f"{rank:g}" for rank in sorted({*ranks}))
    return f"rank {name} on {slow_hosts.pop()} is {slowdown:.0%} slower than the median of the others, which wait"


@_rule(
    "data-bound",
    f"More than {_DEFAULTS.data_wait:.0%} of the time of 10 records is spent waiting for data.",
    "raise data.num_workers or data.prefetch_factor, or put the store on a local disk",
    only_active=True,
)
def _data_bound(run: Snapshot) -> str | None:
    share = run.data_wait_share
    return f"{share:.0%} of a step is waiting for data" if share and share > run.thresholds.data_wait else None


_SPEED_DROP, _BUSY_CORES = 0.5, 0.5


@_rule(
    "low speed",
    f"{_BLOCK} records have less than {_SPEED_DROP:.0%} of the tokens per second of the earlier ones since the start. "
    f"If other processes keep at least {_BUSY_CORES:g} cores of the host more busy than before, it says so.",
    "look for another job, a hot or throttled GPU (`nvidia-smi -q -d PERFORMANCE`), a slow node, disk or network "
    "(`launch_node.sh ... --check` measures it); if the processes that keep cores busy have to stay, stop the run and "
    "start it again with OMP_NUM_THREADS set to the cores that they leave free, at least 1",
    only_active=True,
)
def _low_speed(run: Snapshot) -> str | None:
    speeds, cores = (
        _recent_and_earlier(run.history.recent(tag, _BLOCK + _MAX_EARLIER, session=True), _BLOCK)
        for tag in ("speed/tokens_per_s", "speed/cores_of_others")
    )
    if speeds is None or speeds[0] >= _SPEED_DROP * speeds[1]:
        return None
    found = f"{speeds[0]:.0f} tokens/s (median of {_BLOCK} records), before {speeds[1]:.0f}"
    if cores is not None and cores[0] - cores[1] >= _BUSY_CORES:
        found += f"; other processes keep {cores[0]:.1f} cores of this host busy, before {cores[1]:.1f}"
    return found


@_rule(
    "tracker",
    "A tracker has failed. The training does not depend on it.",
    "trackers/NAME/error.txt in the run folder has the details",
    only_active=True,
)
def _tracker_error(run: Snapshot) -> str | None:
    for path in sorted(run.history.run_dir.glob("trackers/*/error.txt")):
        with suppress(OSError):  # the tracker may have recovered and removed the file
            return read_regular(path, run.history.run_dir).decode(errors="replace").partition("\n")[0]
    return None
