"""Alerts on the processes of a run and the resources of its machine: speed, memory, disk."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mmldlm.errors import ExitCode
from mmldlm.tools.history.metrics_reader import Record
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot, finite_values
from mmldlm.utils.format import human_duration

_GIB = 2**30
_MIN_STEPS_PER_SPEED = 10
_NUM_SPEEDS = 10  # speeds that are compared


def ended_with_error(snapshot: Snapshot) -> Alert | None:
    """Alert if the run was killed or ended with an error."""
    state = snapshot.state
    if state.name == "killed":
        return Alert(
            "killed",
            state.cause,
            "`dmesg` or the scheduler's log says whether memory or a time limit was the reason; the same command "
            "continues from the last checkpoint",
        )
    if state.name == "failed":
        code = "" if state.code is None else f"exit code {state.code}: "
        return Alert("failed", f"{code}{state.cause}", _advice_for_exit_code(state.code))
    return None


def _advice_for_exit_code(code: int | None) -> str:
    resume = "the same command continues from the last checkpoint"
    return {
        int(ExitCode.CONFIG): "fix the setting that is named",
        int(ExitCode.DATA): "fix or remove what is named: `mmldlm data verify` checks a store",
        int(
            ExitCode.NUMERICAL
        ): "skipped_steps.jsonl names the samples; continue with a lower optim.lr, or without them",
        int(ExitCode.STORAGE): f"make room on the disk, or repair it; then {resume}",
        int(ExitCode.PEER_LOST): f"stacks.rank*.txt in the run folder says where each rank was; {resume}",
        int(ExitCode.INTERRUPTED): resume,
    }.get(code if code is not None else -1, f"the traceback is in the run's output; once that is fixed, {resume}")


def rank_lost(snapshot: Snapshot) -> Alert | None:
    """Alert if one of several ranks has ended, by its exit report or because its process on this machine is gone."""
    history = snapshot.history
    if snapshot.state.is_active:
        gone = [process for process in history.processes[1:] if process.state() == "gone"]
        if gone:
            names = ", ".join(f"rank {process.rank} (process {process.pid})" for process in gone)
            return Alert(
                "rank lost",
                f"gone from {gone[0].host}: {names}",
                "the other ranks end as soon as they notice it, within distributed.timeout_s; then the same command "
                "continues from the last checkpoint",
            )
    failed = [report for report in history.exits if not report.is_clean]
    # Without a rank that lost a peer, all ranks ended with an error of their own, such as a wrong setting.
    if any(report.code == ExitCode.PEER_LOST for report in failed):
        first = next((report for report in failed if report.code != ExitCode.PEER_LOST), failed[0])
        return Alert(
            "rank lost",
            f"rank {first.rank} ended at step {first.step} with exit code {first.code}: {first.cause}",
            "look at that rank first: its node's log, stacks.rank*.txt, `mmldlm doctor` on its node; the other ranks "
            "ended because of it",
        )
    return None


def no_news(snapshot: Snapshot) -> Alert | None:
    """Alert if an active run has written nothing for longer than `snapshot.stall_timeout_s`."""
    if snapshot.state.name != "silent":
        return None
    history = snapshot.history
    latest, step_s = history.last(), history.step_s
    assert latest is not None and snapshot.news_age_s is not None
    busy = f" while {latest['what']}" if latest["kind"] == "heartbeat" else ""
    usual = f"; a step usually takes {human_duration(step_s) if step_s >= 10 else f'{step_s:.2g}s'}" if step_s else ""
    found = f"for {human_duration(snapshot.news_age_s)}, since step {latest['step']}{busy}{usual}"
    stopped = [process for process in history.processes if process.state() == "stopped"]
    if stopped:
        pids = " ".join(str(process.pid) for process in stopped)
        return Alert(
            "no news", f"{found}; stopped by a signal: process {pids}", f"`kill -CONT {pids}` lets it continue"
        )
    pid = history.processes[0].pid if history.processes else "PID"
    host = f" on {history.processes[0].host}" if history.processes else ""
    return Alert(
        "no news",
        found,
        f"`py-spy dump --pid {pid}`{host} shows where it hangs; a run of several ranks ends after "
        "distributed.timeout_s, a run of one rank by `kill`; then the same command continues from the last checkpoint",
    )


def unstable_speed(snapshot: Snapshot) -> Alert | None:
    """Alert if tokens per second vary widely, although each value is over at least 10 steps."""
    records_per_speed = max(1, math.ceil(_MIN_STEPS_PER_SPEED / snapshot.history.steps_per_record))
    num_records = _NUM_SPEEDS * records_per_speed
    records = snapshot.session_records[-num_records:]
    if len(records) < num_records:
        return None
    starts = range(0, num_records, records_per_speed)
    speeds = sorted(_speed(records[i : i + records_per_speed]) for i in starts)
    low, high, median = speeds[1], speeds[-2], statistics.median(speeds)
    if high - low <= snapshot.thresholds.speed_spread * median:
        return None
    return Alert(
        "unstable speed",
        f"{low:.0f} to {high:.0f} tokens/s over {records_per_speed * snapshot.history.steps_per_record} steps each",
        "does another job use this machine, its disk or network? A trace (profile.steps=[FIRST,LAST]) shows which "
        "operations vary; if data_wait varies too, see data-bound",
    )


def _speed(records: Sequence[Record]) -> float:
    """Return the tokens per second over all of these training records."""
    seconds = finite_values(records, "speed/step_s")
    tokens = [
        speed * step_s for speed, step_s in zip(finite_values(records, "speed/tokens_per_s"), seconds, strict=True)
    ]
    return sum(tokens) / max(sum(seconds), 1e-9)


def _recent_and_earlier_median(snapshot: Snapshot, tag: str) -> tuple[float, float] | None:
    """Return the medians over the last 10 records and over the earlier session; None while that is short."""
    values = finite_values(snapshot.session_records, tag)
    return (statistics.median(values[-10:]), statistics.median(values[:-10])) if len(values) >= 30 else None


def _describe_slowdown(snapshot: Snapshot) -> str | None:
    """Return a description of the speed if it is far below the earlier speed of this session, otherwise None."""
    speeds = _recent_and_earlier_median(snapshot, "speed/tokens_per_s")
    if speeds is None or speeds[0] >= snapshot.thresholds.speed_drop * speeds[1]:
        return None
    return f"{speeds[0]:.0f} tokens/s (median of 10 records), before {speeds[1]:.0f}"


def busy_cores(snapshot: Snapshot) -> Alert | None:
    """Alert if the speed fell and processes of others keep more of the host's cores busy than before."""
    slowdown, cores = _describe_slowdown(snapshot), _recent_and_earlier_median(snapshot, "speed/cores_of_others")
    if slowdown is None or cores is None or cores[0] - cores[1] < snapshot.thresholds.cores_of_others:
        return None
    return Alert(
        "busy cores",
        f"{slowdown}; other processes keep {cores[0]:.1f} cores of this host busy, before {cores[1]:.1f}",
        "end them, or stop the run and start it again: the same command continues it, and the load at the start "
        "decides whether OpenMP threads spin; if they have to stay, set OMP_NUM_THREADS to the cores that they "
        "leave free",
    )


def low_speed(snapshot: Snapshot) -> Alert | None:
    """Alert if tokens per second fell far below the earlier session, and other processes are not the reason."""
    slowdown = _describe_slowdown(snapshot)
    if slowdown is None or busy_cores(snapshot) is not None:
        return None
    return Alert(
        "low speed",
        slowdown,
        "look for another job on this machine, a hot or throttled GPU (`nvidia-smi -q -d PERFORMANCE`), a slow "
        "node or disk; `mmldlm doctor` measures the network",
    )


def data_bound(snapshot: Snapshot) -> Alert | None:
    """Alert if steps wait for their data."""
    if snapshot.data_wait_share is None or snapshot.data_wait_share <= snapshot.thresholds.data_wait:
        return None
    return Alert(
        "data-bound",
        f"{snapshot.data_wait_share:.0%} of a step is waiting for data",
        "raise data.num_workers or data.prefetch_factor, or put the store on a local disk",
    )


def memory(snapshot: Snapshot) -> Alert | None:
    """Alert if the device or the host has almost no memory left."""
    for name, used, limit in snapshot.memory:
        if used > snapshot.thresholds.memory * limit:
            return Alert(
                "memory",
                f"{used / 1024:.1f} of {limit / 1024:.1f} GiB of the {name} are used",
                "a smaller train.micro_batch_size at the same global_batch_size, train.auto_micro_batch=true or "
                "memory.activation_checkpointing; on the host, fewer data.num_workers",
            )
    return None


def disk(snapshot: Snapshot) -> Alert | None:
    """Alert if the disk of the run folder has no room for the next checkpoints."""
    needed = max(
        snapshot.thresholds.disk_gib * _GIB,
        snapshot.thresholds.disk_checkpoints * snapshot.checkpoint_bytes,
    )
    if snapshot.disk_free_bytes >= needed:
        return None
    return Alert(
        "disk",
        f"{snapshot.disk_free_bytes / _GIB:.2g} GiB are free for {snapshot.history.run_dir}; "
        f"a checkpoint takes {snapshot.checkpoint_bytes / _GIB:.2g} GiB",
        "make room, or keep fewer checkpoints (checkpoint.keep_last); a run that cannot save ends with exit code 74",
    )
