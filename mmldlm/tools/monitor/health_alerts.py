"""Alerts about whether a run is there at all, and how it gets on with its machine: speed, memory, disk."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mmldlm.errors import ExitCode
from mmldlm.tools.history.metrics_reader import Record
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot, values_of
from mmldlm.utils.format import human_duration

_GIB = 2**30
_STEPS, _SPEEDS = 10, 10  # steps at least of which a speed is taken, and how many such speeds are compared


def ended_badly(look: Snapshot) -> Alert | None:
    """The run has ended, and not in good order."""
    state = look.state
    if state.name == "killed":
        return Alert(
            "killed",
            state.cause,
            "`dmesg` or the scheduler's log says whether memory or a time limit was the reason; the same command goes "
            "on from the last checkpoint",
        )
    if state.name == "failed":
        code = "" if state.code is None else f"exit code {state.code}: "
        return Alert("failed", f"{code}{state.cause}", _what_to_do(state.code))
    return None


def _what_to_do(code: int | None) -> str:
    again = "the same command goes on from the last checkpoint"
    return {
        int(ExitCode.CONFIG): "mend the setting that is named",
        int(ExitCode.DATA): "mend or leave out what is named: `mmldlm data verify` checks a store",
        int(ExitCode.NUMERICAL): "skipped_steps.jsonl names the samples; go on with a lower optim.lr, or without them",
        int(ExitCode.STORAGE): f"make room on the disk, or mend it; then {again}",
        int(ExitCode.PEER_LOST): f"stacks.rank*.txt in the run folder says where each rank was; {again}",
        int(ExitCode.INTERRUPTED): again,
    }.get(code if code is not None else -1, f"the traceback is in the run's output; once that is mended, {again}")


def rank_lost(look: Snapshot) -> Alert | None:
    """A rank of several has ended by itself: by its words, or because its process here is gone."""
    history = look.history
    if look.state.is_open:
        gone = [process for process in history.processes[1:] if process.state() == "gone"]
        if gone:
            names = ", ".join(f"rank {process.rank} (process {process.pid})" for process in gone)
            return Alert(
                "rank lost",
                f"gone from {gone[0].host}: {names}",
                "the other ranks end by themselves as soon as they miss it, within distributed.timeout_s; then the "
                "same command goes on from the last checkpoint",
            )
    lost = [words for words in history.exits if not words.is_good]
    if any(words.code == ExitCode.PEER_LOST for words in lost):  # else all ended with one error, each by itself
        first = next((words for words in lost if words.code != ExitCode.PEER_LOST), lost[0])
        return Alert(
            "rank lost",
            f"rank {first.rank} ended at step {first.step} with exit code {first.code}: {first.cause}",
            "look at that rank first: its node's log, stacks.rank*.txt, `mmldlm doctor` on its node; the others only "
            "followed",
        )
    return None


def no_news(look: Snapshot) -> Alert | None:
    """The run should go on, but has written nothing for longer than `look.patience_s`."""
    if look.state.name != "silent":
        return None
    history = look.history
    latest, step_s = history.last(), history.step_s
    assert latest is not None and look.news_age_s is not None
    busy = f" while {latest['what']}" if latest["kind"] == "heartbeat" else ""
    usual = f"; a step usually takes {human_duration(step_s) if step_s >= 10 else f'{step_s:.2g}s'}" if step_s else ""
    found = f"for {human_duration(look.news_age_s)}, since step {latest['step']}{busy}{usual}"
    stopped = [process for process in history.processes if process.state() == "stopped"]
    if stopped:
        pids = " ".join(str(process.pid) for process in stopped)
        return Alert("no news", f"{found}; stopped by a signal: process {pids}", f"`kill -CONT {pids}` lets it go on")
    pid = history.processes[0].pid if history.processes else "PID"
    host = f" on {history.processes[0].host}" if history.processes else ""
    return Alert(
        "no news",
        found,
        f"`py-spy dump --pid {pid}`{host} shows where it is; a run of several ranks ends by itself after "
        "distributed.timeout_s, one of a single rank by `kill`; then the same command goes on from the last checkpoint",
    )


def unstable_speed(look: Snapshot) -> Alert | None:
    """Tokens a second scatter widely, though each value is of at least 10 steps."""
    together = max(1, math.ceil(_STEPS / look.history.steps_between))
    records = look.session[-_SPEEDS * together :]
    if len(records) < _SPEEDS * together:
        return None
    speeds = sorted(_speed(records[i : i + together]) for i in range(0, len(records), together))
    low, high, middle = speeds[1], speeds[-2], statistics.median(speeds)
    if high - low <= look.thresholds.speed_spread * middle:
        return None
    return Alert(
        "unstable speed",
        f"{low:.0f} to {high:.0f} tokens/s over {together * look.history.steps_between} steps each",
        "is another job on this machine, its disk or network? A trace says which operations vary "
        "(profile.steps=[FIRST,LAST]); if data_wait varies too, see data-bound",
    )


def _speed(records: Sequence[Record]) -> float:
    """Tokens a second over all of these training records."""
    seconds = values_of(records, "speed/step_s")
    tokens = [speed * of for speed, of in zip(values_of(records, "speed/tokens_per_s"), seconds, strict=True)]
    return sum(tokens) / max(sum(seconds), 1e-9)


def _change(look: Snapshot, tag: str) -> tuple[float, float] | None:
    """Medians of a value over the last 10 records and over the session before; None while that is short."""
    values = values_of(look.session, tag)
    return (statistics.median(values[-10:]), statistics.median(values[:-10])) if len(values) >= 30 else None


def _fall(look: Snapshot) -> str | None:
    """The speed in words where it is far below what this session has had before."""
    speeds = _change(look, "speed/tokens_per_s")
    if speeds is None or speeds[0] >= look.thresholds.speed_drop * speeds[1]:
        return None
    return f"{speeds[0]:.0f} tokens/s (median of 10 records), before {speeds[1]:.0f}"


def busy_cores(look: Snapshot) -> Alert | None:
    """The speed fell, and processes that are not of the run keep more of its cores busy than before."""
    fall, cores = _fall(look), _change(look, "speed/cores_of_others")
    if fall is None or cores is None or cores[0] - cores[1] < look.thresholds.cores_of_others:
        return None
    return Alert(
        "busy cores",
        f"{fall}; other processes keep {cores[0]:.1f} cores of this host busy, before {cores[1]:.1f}",
        "end them, or stop the run and start it again: the same command goes on, and OpenMP's spinning is chosen by "
        "the load at the start; if they are to stay, set OMP_NUM_THREADS to the cores that they leave",
    )


def low_speed(look: Snapshot) -> Alert | None:
    """Far fewer tokens a second than this session has had before, and no other processes to account for it."""
    fall = _fall(look)
    if fall is None or busy_cores(look) is not None:
        return None
    return Alert(
        "low speed",
        fall,
        "look for another job on this machine, a GPU that is hot or throttled (`nvidia-smi -q -d PERFORMANCE`), a slow "
        "node or disk; `mmldlm doctor` measures the network",
    )


def data_bound(look: Snapshot) -> Alert | None:
    """Steps wait for their data."""
    if look.data_wait is None or look.data_wait <= look.thresholds.data_wait:
        return None
    return Alert(
        "data-bound",
        f"{look.data_wait:.0%} of a step is waiting for data",
        "raise data.num_workers or data.prefetch_factor, or put the store on a local disk",
    )


def memory(look: Snapshot) -> Alert | None:
    """Device or host have next to no memory left."""
    for what, taken, limit in look.memory:
        if taken > look.thresholds.memory * limit:
            return Alert(
                "memory",
                f"{taken / 1024:.1f} of {limit / 1024:.1f} GiB of the {what} are taken",
                "a smaller train.micro_batch_size at the same global_batch_size, train.auto_micro_batch=true or "
                "memory.activation_checkpointing; on the host, fewer data.num_workers",
            )
    return None


def disk(look: Snapshot) -> Alert | None:
    """The disk of the run folder has no room for the next checkpoints."""
    needed = max(
        look.thresholds.disk_gib * _GIB,
        look.thresholds.disk_checkpoints * look.checkpoint_bytes,
    )
    if look.disk_free >= needed:
        return None
    return Alert(
        "disk",
        f"{look.disk_free / _GIB:.2g} GiB are free for {look.history.run_dir}; "
        f"a checkpoint takes {look.checkpoint_bytes / _GIB:.2g} GiB",
        "make room, or keep fewer checkpoints (checkpoint.keep_last); a run that cannot save ends with exit code 74",
    )
