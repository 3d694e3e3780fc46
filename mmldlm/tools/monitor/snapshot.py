"""A snapshot of a run, from which alerts and views are computed."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mmldlm.settings.declaration import setting
from mmldlm.tools.records import Record
from mmldlm.tools.run_history import RECENT_RECORDS, History
from mmldlm.tools.run_status import RunState


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the alerts. "Records" are training records, one every `log.every` steps."""

    skip_steps: int = setting(100, "skipped steps are reported if they are among the last so many steps", at_least=1)
    overflow_share: float = setting(
        0.05, "share of the last 200 steps that an overflow of fp16 skipped", above=0, at_most=1
    )
    rise: float = setting(
        0.05,
        "relative rise of the loss: median of 10 records over the lowest median of 10 consecutive records",
        above=0,
    )
    diverged: float = setting(
        0.2, "relative rise of the loss of 10 records over the largest of the first three", above=0
    )
    validation_rise: float = setting(
        0.02,
        "relative rise of the validation loss over its lowest value, in 3 validations that are each worse",
        above=0,
    )
    flat: float = setting(
        0.005, "relative fall of the loss in the last quarter of the steps below which it counts as a plateau", above=0
    )
    norm_jump: float = setting(5.0, "gradient norm of 5 records, as a multiple of the 100 before", above=1)
    norm_clipped: float = setting(50.0, "gradient norm of 20 records, as a multiple of optim.clip_norm", above=1)
    speed_spread: float = setting(
        0.5,
        "range of 10 speeds over their median, without the highest and lowest; each is of 10 steps or more",
        above=0,
    )
    speed_drop: float = setting(
        0.5, "tokens per second of 10 records over the earlier ones of the session", above=0, below=1
    )
    cores_of_others: float = setting(
        0.5, "cores that other processes keep busy in 10 records, above the earlier ones of the session", above=0
    )
    data_wait: float = setting(0.2, "share of the step time spent waiting for data, over 10 records", above=0, below=1)
    memory: float = setting(0.95, "share of the device's or the host's memory that is used", above=0, below=1)
    disk_checkpoints: float = setting(3.0, "free disk space, in sizes of the newest checkpoint", at_least=0)
    disk_gib: float = setting(1.0, "free disk space in GiB", at_least=0)
    mirror_checkpoints: int = setting(3, "checkpoints that are newer than the newest copy in the mirror", at_least=0)
    silent_steps: float = setting(
        10.0, "typical step times without news, at least the time of two records, plus --interval", at_least=1
    )
    silent_s: float = setting(900.0, "seconds without news while the step time is unknown, as after a start", above=0)


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, `now` in Unix seconds; snapshots are `interval_s` apart."""

    history: History
    interval_s: float
    thresholds: Thresholds = Thresholds()
    now: float = field(default_factory=time.time)

    @cached_property
    def state(self) -> RunState:
        """State of the run, `silent` after `stall_timeout_s` without news."""
        return self.history.state(self.now, self.stall_timeout_s)

    @cached_property
    def train_records(self) -> list[Record]:
        """All training records."""
        return self.history.by_kind("train")

    @cached_property
    def session_records(self) -> list[Record]:
        """Training records since the latest start or resume, without the first, whose speed includes the start."""
        return self.history.session("train")[1:]

    @cached_property
    def news_age_s(self) -> float | None:
        """Seconds since the latest record; None without records."""
        return self.history.news_age_s(self.now)

    @cached_property
    def stall_timeout_s(self) -> float:
        """Seconds without news after which a run counts as silent."""
        history, step_s = self.history, self.history.step_s
        latest = history.last()
        if latest is None or latest["kind"] in ("start", "resume") or step_s is None:
            return self.interval_s + self.thresholds.silent_s
        timeout_s = self.thresholds.silent_steps * step_s
        # A stopped process explains the silence, so the time of two records need not pass.
        if any(process.state() == "stopped" for process in history.processes):
            return self.interval_s + timeout_s
        timeout_s = max(timeout_s, 2 * history.steps_per_record * step_s)
        if latest["kind"] == "heartbeat":
            timeout_s = max(timeout_s, self._heartbeat_timeout_s(latest))
        return self.interval_s + timeout_s

    def _heartbeat_timeout_s(self, heartbeat: Record) -> float:
        """Return how long the activity that `heartbeat` announced may take: `silent_steps` times its usual duration."""
        durations_s = self.history.durations_s(heartbeat["what"])[-RECENT_RECORDS:]
        if not durations_s:
            return self.thresholds.silent_s
        return self.thresholds.silent_steps * statistics.median(durations_s)

    @cached_property
    def eta_s(self) -> float | None:
        """Estimated seconds to the last step, at the recent speed including validations and saves; None if unknown."""
        # 20 intervals between records.
        recent, total = self.session_records[-21:], self.history.total_steps
        if not self.state.is_active or total is None or len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
            return None
        step_s = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        return max(0, total - self.history.step) * step_s

    @cached_property
    def data_wait_share(self) -> float | None:
        """Share of the time of the last 10 records' steps that was spent waiting for data; None with fewer records."""
        recent = self.session_records[-10:]
        wait_s, step_s = (
            sum(filter(math.isfinite, (record.get(tag) or 0.0 for record in recent)))
            for tag in ("speed/data_wait_s", "speed/step_s")
        )
        return wait_s / step_s if len(recent) == 10 and step_s else None

    @cached_property
    def memory(self) -> list[tuple[str, float, float]]:
        """(name, used, limit) in MiB of rank 0's device and host, if the run reports them."""
        latest = self.train_records[-1] if self.train_records else {}
        ranks = self.history.startup.get("ranks") or [{}]
        device, host = ranks[0].get("device_memory_mib"), ranks[0].get("host_memory_mib")
        memory = []
        if device and latest.get("memory/cuda_peak_reserved_mib") is not None:
            memory.append((f"device {ranks[0].get('device', '')}", latest["memory/cuda_peak_reserved_mib"], device))
        if host and latest.get("memory/host_free_mib") is not None:
            memory.append(("host", host - latest["memory/host_free_mib"], host))
        return memory

    @cached_property
    def disk_free_bytes(self) -> int:
        """Free bytes on the disk of the run folder."""
        return shutil.disk_usage(self.history.run_dir).free

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Size of the newest checkpoint; 0 without one."""
        folders = sorted((self.history.run_dir / "checkpoints").glob("step-*"))
        return sum(map(_size, folders[-1].rglob("*"))) if folders else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # the checkpoint was removed in the meantime
        return 0
