"""A snapshot of a run: the input of alerts and views."""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from mmldlm.settings.declaration import setting
from mmldlm.tools.runs import RECENT_RECORDS, History, RunState

SILENT_STEPS = 10  # a run is silent after this many times the usual duration of a step, or of an announced activity


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of alerts that users may have to adapt to a machine or run."""

    memory: float = setting(0.95, "share of the device's or the host's memory that is used", above=0, below=1)
    disk_gib: float = setting(1.0, "free disk space in GiB", at_least=0)
    data_wait: float = setting(0.2, "share of the step time spent waiting for data, over 10 records", above=0, below=1)
    silent_s: float = setting(900.0, "seconds without news while the step time is unknown, as after a start", above=0)


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, `now` in Unix seconds. The next snapshot follows after `interval_s`."""

    history: History
    interval_s: float
    thresholds: Thresholds = Thresholds()
    now: float = field(default_factory=time.time)

    @cached_property
    def state(self) -> RunState:
        """State of the run, which is `silent` after `stall_timeout_s` without news."""
        return self.history.state(self.now, self.stall_timeout_s)

    @cached_property
    def news_age_s(self) -> float | None:
        """Seconds since the latest record, or None without records."""
        return self.history.news_age_s(self.now)

    @cached_property
    def stall_timeout_s(self) -> float:
        """Seconds without news after which a run counts as silent."""
        history, step_s = self.history, self.history.step_s
        latest = history.last()
        if latest is None or latest["kind"] in ("start", "resume") or step_s is None:
            return self.interval_s + self.thresholds.silent_s
        timeout_s = SILENT_STEPS * step_s
        # A stopped process explains the silence, so we need not wait for the time of two records.
        if any(process.state() == "stopped" for process in history.processes):
            return self.interval_s + timeout_s
        timeout_s = max(timeout_s, 2 * history.steps_per_record * step_s)
        if latest["kind"] == "heartbeat":  # an announced activity may take longer
            durations_s = history.durations_s[latest["what"]][-RECENT_RECORDS:]
            usual_s = SILENT_STEPS * statistics.median(durations_s) if durations_s else self.thresholds.silent_s
            timeout_s = max(timeout_s, usual_s)
        return self.interval_s + timeout_s

    @cached_property
    def eta_s(self) -> float | None:
        """Estimated seconds to the last step, at the recent speed with validations and saves. None if unknown."""
        history, total = self.history, self.history.total_steps
        records = history.after(history.session_start, "train")[1:][-21:]  # 20 intervals
        steps = records[-1]["step"] - records[0]["step"] if records else 0
        if not self.state.is_active or total is None or steps < 1:
            return None
        return max(0, total - history.step) * (records[-1]["time"] - records[0]["time"]) / steps

    @cached_property
    def data_wait_share(self) -> float | None:
        """Share of the step time that was spent waiting for data over the last 10 records. None with fewer records."""
        wait_s = self.history.recent("speed/data_wait_s", 10, session=True)
        step_s = self.history.recent("speed/step_s", 10, session=True)
        return sum(wait_s) / sum(step_s) if len(step_s) == 10 and any(step_s) else None

    @cached_property
    def memory(self) -> list[tuple[str, float, float]]:
        """(name, used, limit) in MiB of rank 0's device and host, if the run reports them."""
        latest, (rank, *_) = self.history.last("train") or {}, self.history.startup.get("ranks") or [{}]
        device_mib, host_mib = rank.get("device_memory_mib"), rank.get("host_memory_mib")
        peak_mib, free_mib = latest.get("memory/cuda_peak_reserved_mib"), latest.get("memory/host_free_mib")
        memory = []
        if device_mib and peak_mib is not None:
            memory.append((f"device {rank.get('device', '')}", peak_mib, device_mib))
        if host_mib and free_mib is not None:
            memory.append(("host", host_mib - free_mib, host_mib))
        return memory

    @cached_property
    def disk_free_bytes(self) -> int:
        """Free bytes on the disk of the run folder."""
        return shutil.disk_usage(self.history.run_dir).free

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Size of the newest checkpoint, or 0 if there is none."""
        newest = max((self.history.run_dir / "checkpoints").glob("step-*"), default=None)
        with suppress(OSError):  # the run may remove the checkpoint while we look at it
            return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) if newest else 0
        return 0
