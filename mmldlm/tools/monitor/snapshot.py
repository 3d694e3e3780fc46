"""One look at a run: what alerts and views go by."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from mmldlm.settings.fields import setting
from mmldlm.tools.history.metrics_reader import Record
from mmldlm.tools.history.run_history import RECENT, History
from mmldlm.tools.history.run_status import State


@dataclass(frozen=True)
class Thresholds:
    """From where on an alert is given. "Records" are the training records, one each `log.every` steps."""

    skip_steps: int = setting(100, "a step that was skipped less than so many steps ago is told of", at_least=1)
    overflow_share: float = setting(
        0.05, "share of the last 200 steps lost to a loss scale of fp16 that is still too large", above=0, at_most=1
    )
    rise: float = setting(
        0.05, "rise of the loss, relative to the lowest: 10 records' median over that of the best 10 in a row", above=0
    )
    diverged: float = setting(0.2, "loss of 10 records above the largest of the first three, relative to that", above=0)
    validation_rise: float = setting(
        0.02, "rise of the validation loss, relative to the lowest, over the last 3 validations, each worse", above=0
    )
    flat: float = setting(
        0.005, "fall of the loss in the last quarter of the steps, relative, below which it stands still", above=0
    )
    norm_jump: float = setting(5.0, "gradient norm of 5 records over that of the 100 before", above=1)
    norm_clipped: float = setting(50.0, "gradient norm of 20 records over optim.clip_norm", above=1)
    speed_spread: float = setting(
        0.5,
        "highest less lowest of 10 speeds of 10 steps or more each, the two outermost left out, over their median",
        above=0,
    )
    speed_drop: float = setting(0.5, "tokens a second of 10 records over those of the session before", above=0, below=1)
    cores_of_others: float = setting(
        0.5, "cores that other processes keep busy in 10 records beyond those of the session before", above=0
    )
    data_wait: float = setting(0.2, "share of a step's time that is waited for data, over 10 records", above=0, below=1)
    memory: float = setting(0.95, "share of the device's or the host's memory that is taken", above=0, below=1)
    disk_checkpoints: float = setting(3.0, "free disk space, in sizes of the newest checkpoint", at_least=0)
    disk_gib: float = setting(1.0, "free disk space in GiB", at_least=0)
    silent_steps: float = setting(
        10.0, "usual times of a step without news, but at least two records' worth, and --interval", at_least=1
    )
    silent_s: float = setting(900.0, "seconds without news where it is not known what is usual: at a start", above=0)


@dataclass(frozen=True)
class Snapshot:
    """`history` as it was at `now`, in unix seconds; whoever looks does so every `interval_s`."""

    history: History
    interval_s: float
    thresholds: Thresholds = Thresholds()
    now: float = field(default_factory=time.time)

    @cached_property
    def state(self) -> State:
        return self.history.state(self.now, self.patience_s)

    @cached_property
    def train(self) -> list[Record]:
        return self.history.of("train")

    @cached_property
    def session(self) -> list[Record]:
        """Training records since the latest start or resume, but for the first, which pays for the start."""
        return [record for record in self.history.session if record["kind"] == "train"][1:]

    @cached_property
    def news_age_s(self) -> float | None:
        return self.history.news_age_s(self.now)

    @cached_property
    def patience_s(self) -> float:
        """Seconds without news after which a run counts as silent."""
        history, step_s = self.history, self.history.step_s
        latest = history.last()
        if latest is None or latest["kind"] in ("start", "resume") or step_s is None:
            return self.interval_s + self.thresholds.silent_s
        usual = self.thresholds.silent_steps * step_s
        if any(process.state() == "stopped" for process in history.processes):
            return self.interval_s + usual
        usual = max(usual, 2 * history.steps_between * step_s)
        if latest["kind"] == "heartbeat":
            usual = max(usual, self._busy_s(latest))
        return self.interval_s + usual

    def _busy_s(self, heartbeat: Record) -> float:
        """How long a run may be busy with what it announced: ten times as long as it usually was."""
        records = self.history.records
        spent = [
            after["time"] - before["time"]
            for before, after in pairwise(records)
            if before["kind"] == "heartbeat" and before.get("what") == heartbeat.get("what")
        ][-RECENT:]
        return self.thresholds.silent_steps * statistics.median(spent) if spent else self.thresholds.silent_s

    @cached_property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the speed of the recent ones, validations and saves included."""
        recent, total = self.session[-21:], self.history.total_steps
        if not self.state.is_open or total is None or len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
            return None
        pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        return max(0, total - self.history.step) * pace

    @cached_property
    def data_wait(self) -> float | None:
        """Share of the time of the last 10 records' steps that went by in waiting for data."""
        recent = self.session[-10:]
        waited, passed = sum(values_of(recent, "speed/data_wait_s")), sum(values_of(recent, "speed/step_s"))
        return waited / passed if len(recent) == 10 and passed else None

    @cached_property
    def memory(self) -> list[tuple[str, float, float]]:
        """(what, taken, limit) in MiB of rank 0's device and host, as far as the run says."""
        latest, ranks = self.train[-1] if self.train else {}, self.history.startup.get("ranks") or [{}]
        device, host = ranks[0].get("device_memory_mib"), ranks[0].get("host_memory_mib")
        found = []
        if device and "memory/cuda_reserved_mib" in latest:
            found.append((f"device {ranks[0].get('device', '')}", latest["memory/cuda_reserved_mib"], device))
        if host and "memory/host_free_mib" in latest:
            found.append(("host", host - latest["memory/host_free_mib"], host))
        return found

    @cached_property
    def disk_free(self) -> int:
        """Bytes that are free where the run folder is."""
        return shutil.disk_usage(self.history.run_dir).free

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of the newest checkpoint; 0 where there is none."""
        folders = sorted((self.history.run_dir / "checkpoints").glob("step-*"))
        return sum(map(_size, folders[-1].rglob("*"))) if folders else 0


def values_of(records: Sequence[Record], tag: str) -> list[float]:
    """The finite values of `tag` in `records`."""
    found = [record.get(tag) for record in records]
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # a checkpoint that was just let go
        return 0
