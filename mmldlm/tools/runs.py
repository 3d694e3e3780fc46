"""Read the records and the state of a run from its folder, during the run or afterwards. Imports no torch."""

from __future__ import annotations

import math
import socket
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from mmldlm.errors import ConfigError, DataError, ExitCode
from mmldlm.settings.successors import current
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.records import ExitReport, Lock, Record, StartupReport, check_record, read_model
from mmldlm.utils.files import open_regular
from mmldlm.utils.format import human_duration
from mmldlm.utils.nested import flatten

# Keys of the start-up report that influence a run, in addition to its config.
_ENVIRONMENT_KEYS = (
    *("engine", "sharding", "world_size", "nodes", "optimizer", "attention", "compile"),
    *("git", "data_manifest", "versions"),
)
CURVE_KINDS = ("train", "validation", "scalars")  # kinds of records that contribute points to curves
RECENT_RECORDS = 50  # training records from which typical values are computed

_TAIL_BYTES = 512  # enough to contain the time of a record, so no other file ends with the same bytes
_LOCK_WRITE_TIMEOUT_S = 5.0  # a new lock file may stay empty this long, until its owner is written into it
_CLOCK_TOLERANCE_S = 60.0  # if the clock was set, a process may seem younger than the lock that it holds

StateName = Literal["running", "silent", "finished", "stopped", "failed", "killed"]
_CLEAN_EXITS: Mapping[int, StateName] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


class Series(NamedTuple):
    """The values of a metric by step. A value that was not finite is NaN."""

    steps: list[int]
    values: list[float]


class Start(NamedTuple):
    """A start of a run after `step` steps: its config by dotted key, and its start-up report."""

    step: int
    config: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def environment(self) -> dict[str, Any]:
        """Everything in the start-up report that influences a run, by dotted key, e.g. engine and versions."""
        processors = {str(rank["processor"]) for rank in self.report.get("ranks", ()) if "processor" in rank}
        values = {key: self.report[key] for key in _ENVIRONMENT_KEYS if key in self.report}
        values |= {"processor": " and ".join(sorted(processors))} if processors else {}
        return {key: value for key, value in flatten(values).items() if isinstance(value, str | int)}


class MetricsReader:
    """The records of a metrics file, without records that a resume superseded. Each line is read only once.

    The file may be missing, grow, end with a torn line, or be replaced (a resume does that).

    Attributes:
        records: All records in the order of the file. A metric that was not finite is NaN.
        started: The latest record of a start or resume.
        step: The last step with a record of any kind.
        damaged: Number of lines that are no records. A last line that is still being written does not count.
        durations_s: For each announced activity, the seconds from each of its heartbeats to the next record.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.damaged, self._offset, self._tail = 0, 0, b""
        self._index([])

    def _index(self, records: list[Record]) -> None:
        self.records: list[Record] = []
        self.started: Record | None = None
        self.step = 0
        self._of_kind: dict[str, list[Record]] = defaultdict(list)
        self.durations_s: dict[str, list[float]] = defaultdict(list)
        self._series: dict[tuple[str, tuple[str, ...]], tuple[Series, int]] = {}  # with the number of records seen
        for record in records:
            self._add(record)

    def _add(self, record: Record) -> None:
        kind, before = record["kind"], self.last()
        if kind in ("start", "resume"):
            if record["step"] < self.step:  # the run trains the later steps again
                self._index([old for old in self.records if old["step"] <= record["step"]])
            self.started = record
        elif before is not None and before["kind"] == "heartbeat":
            self.durations_s[before["what"]].append(record["time"] - before["time"])
        self.step = max(self.step, record["step"])
        self.records.append(record)
        self._of_kind[kind].append(record)

    def refresh(self) -> bool:
        """Read the lines that were added and return whether anything changed. Raises OSError if that fails."""
        try:
            with open_regular(self.path, self.path.parent) as file:
                # If the file was replaced, the bytes before the offset are not the ones that we read there.
                file.seek(self._offset - len(self._tail))
                is_other = file.read(len(self._tail)) != self._tail
                if is_other:
                    self._forget()
                    file.seek(0)
                added = file.read()
        except FileNotFoundError:
            had_records = bool(self.records)
            self._forget()
            return had_records
        added = added[: added.rfind(b"\n") + 1]  # leave a torn last line for the next refresh
        self._offset += len(added)
        self._tail = (self._tail + added)[-_TAIL_BYTES:]
        for line in added.split(b"\n"):
            try:
                self._add(check_record(line))
            except DataError:
                self.damaged += bool(line.strip())
        return is_other or bool(added)

    def by_kind(self, kind: str) -> list[Record]:
        """Return the records of a kind. `telemetry/metrics.py` lists the kinds."""
        return self._of_kind[kind]

    def last(self, kind: str | None = None) -> Record | None:
        """Return the latest record, or the latest of `kind`."""
        records = self.records if kind is None else self._of_kind[kind]
        return records[-1] if records else None

    def after(self, step: int, kind: str) -> list[Record]:
        """Return the records of a kind after `step`."""
        records = self._of_kind[kind]
        return records[bisect_right(records, step, key=itemgetter("step")) :]

    def series(self, tag: str, *kinds: str) -> Series:
        """Return the values of the metric `tag` in records of `kinds` (default: `CURVE_KINDS`)."""
        kinds = kinds or CURVE_KINDS
        series, count = self._series.get((tag, kinds), (Series([], []), 0))
        for record in self.records[count:]:
            if record["kind"] in kinds and record.get(tag) is not None:
                series.steps.append(record["step"])
                series.values.append(float(record[tag]))
        self._series[tag, kinds] = series, len(self.records)
        return series

    def recent(self, tag: str, count: int = RECENT_RECORDS, session: bool = False) -> list[float]:
        """Return the finite values of the metric `tag` in the last `count` training records that have it.

        With `session`, take only records since the latest start or resume, except the first: its speed includes the
        start.
        """
        steps, values = self.series(tag, "train")
        first = bisect_right(steps, self.session_start) + 1 if session else 0
        return list(filter(math.isfinite, values[max(first, len(values) - count) :]))

    def tags(self, *kinds: str) -> list[str]:
        """Return the tags (`group/name`) with a series in records of `kinds`, in order of first appearance."""
        kinds = kinds or CURVE_KINDS
        records = (record for record in self.records if record["kind"] in kinds)
        return list(dict.fromkeys(key for one in records for key in one if "/" in key and one[key] is not None))

    @property
    def session_start(self) -> int:
        """Step of the latest start or resume."""
        return self.started["step"] if self.started else 0

    @property
    def total_steps(self) -> int | None:
        """`train.steps` of the latest start or resume, or None before the first start."""
        return self.started.get("total_steps") if self.started else None

    @property
    def step_s(self) -> float | None:
        """Typical seconds of a step, including waits for data but not validations and saves."""
        recent = self.recent("speed/step_s")
        return statistics.median(recent) if recent else None

    @property
    def steps_per_record(self) -> int:
        """Typical number of steps from one training record to the next."""
        steps = [record["step"] for record in self.by_kind("train")[-RECENT_RECORDS:]]
        gaps = [later - earlier for earlier, later in pairwise(steps) if later > earlier]
        # If there is only one record, count its steps from the start.
        return round(statistics.median(gaps)) if gaps else max(steps[-1:], default=1)


class RunState(NamedTuple):
    """State of a run.

    Attributes:
        name: A `silent` run seems to be active, but has no news. A `killed` run's process is gone, and left no exit
            report.
    """

    name: StateName
    code: int | None = None
    cause: str = ""

    @property
    def is_active(self) -> bool:
        """Return whether the run has not ended yet."""
        return self.name in ("running", "silent")


class RankProcess(NamedTuple):
    """The process of a rank, which existed at `seen_at` (Unix seconds).

    A process with this pid that was created later is a different one.
    """

    rank: int
    host: str
    pid: int
    seen_at: float

    def state(self) -> Literal["elsewhere", "running", "stopped", "gone"]:
        """Return the state on this machine. "stopped" means by SIGSTOP or a debugger."""
        if self.host != socket.gethostname():
            return "elsewhere"
        try:
            process = psutil.Process(self.pid)
            if process.create_time() > self.seen_at + _CLOCK_TOLERANCE_S:
                return "gone"
            status = process.status()
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:  # another user's process, on a system that hides them
            return "running"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


class History(MetricsReader):
    """The contents of `run_dir` at the last `refresh`. Raises `DataError` if it is not a run folder.

    Attributes:
        exits: Exit reports of the ranks, with the report of the run first.
        processes: Processes of a run that has not ended cleanly, by rank.
    """

    def __init__(self, run_dir: Path | str):
        self.run_dir = Path(run_dir)
        if not any((self.run_dir / name).exists() for name in ("metrics.jsonl", "run.lock", "exit.json")):
            raise DataError(f"{self.run_dir} is no run folder: expected metrics.jsonl in it, found no such file")
        super().__init__(self.run_dir / "metrics.jsonl")
        self.refresh()
        self._last_change_at = -math.inf

    def refresh(self) -> bool:
        """Read the folder again and return whether there are new records."""
        for name in ("config", "startup", "starts"):  # a new start has replaced them
            self.__dict__.pop(name, None)
        # Read the records last: once a process has ended, all its records are there, so we never see an end without
        # the records before it.
        self.exits = read_exits(self.run_dir)
        self.processes = self._read_processes()
        self._is_gone = bool(self.processes) and self.processes[0].state() == "gone"
        has_news = super().refresh()
        if has_news:
            self._last_change_at = time.time()
        if (self._is_gone or not self.processes) and not self.exits:  # the run may have ended since the first look
            self.exits = read_exits(self.run_dir)
        self._lock_was_released = lock_was_released(self.run_dir)
        return has_news

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.run_dir.resolve().name

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the latest start, by dotted key. Empty if the file cannot be read."""
        path = self.run_dir / "config.yaml"
        try:
            return flatten(current(read_yaml(path, path.parent), str(path), is_record=True))
        except ConfigError:
            return {}

    @cached_property
    def startup(self) -> Mapping[str, Any]:
        """The newest start-up report, or an empty one if no start has written any."""
        report = read_model(self.run_dir / "startup.json", StartupReport)
        return report.model_dump(exclude_unset=True) if report else {}

    @cached_property
    def starts(self) -> list[Start]:
        """The starts that computed the run's steps, in order. Without configs in records, one start by the files."""
        starts = dict[int, Start]()
        for record in (*self.by_kind("start"), *self.by_kind("resume")):
            with suppress(ConfigError):  # another version wrote the config
                if config := record.get("config"):
                    starts[record["step"]] = Start(record["step"], flatten(current(config, "", is_record=True)), record)
        return [*starts.values()] or [Start(0, self.config, self.startup)]

    def _read_processes(self) -> list[RankProcess]:
        """Return the processes of all ranks if the lock's owner wrote the start-up report, otherwise only the owner.

        After a clean end the lock has no owner, so there are no processes.
        """
        lock = read_model(self.run_dir / "run.lock", Lock)
        if lock is None:
            return []
        ranks, owner = [(rank["host"], rank["pid"]) for rank in self.startup.get("ranks", [])], (lock.host, lock.pid)
        known = ranks if ranks[:1] == [owner] else [owner]
        # All ranks exist before rank 0 takes the lock.
        return [RankProcess(rank, *process, lock.started.timestamp()) for rank, process in enumerate(known)]

    def news_age_s(self, now: float | None = None) -> float | None:
        """Return the seconds since the latest record, or None without records.

        The clock of the run's machine may differ from ours, so a record counts as new when a refresh first reads it.
        """
        latest = self.last()
        if latest is None:
            return None
        return max(0.0, (time.time() if now is None else now) - max(latest["time"], self._last_change_at))

    def state(self, now: float | None = None, stall_timeout_s: float = math.inf) -> RunState:
        """Return the state of the run at `now` (Unix seconds, by default the current time).

        An active run is silent if its latest record is older than `stall_timeout_s`.
        """
        if self.exits:
            report = self.exits[0]
            return RunState(_CLEAN_EXITS.get(report.code, "failed"), report.code, report.cause)
        end = self.last()
        if (not self.processes or self._is_gone) and end is not None and end["kind"] == "end":
            if stopped_by := end.get("stopped_by"):
                return RunState("stopped", cause=f"stopped by {stopped_by}")
            return RunState("finished", cause="finished")
        if self._is_gone:
            return RunState("killed", cause=f"process {self.processes[0].pid} is gone and left no exit.json")
        if self._lock_was_released:
            return RunState("failed", cause="ended, but could not leave an exit.json: the disk may be full")
        age = self.news_age_s(now)
        if age is not None and age > stall_timeout_s:
            return RunState("silent", cause=f"no news for {human_duration(age)}")
        return RunState("running")


def read_exits(run_dir: Path) -> list[ExitReport]:
    """Return the exit reports of the ranks. The first is `exit.json`, the report of the run."""
    paths = [run_dir / "exit.json", *sorted(run_dir.glob("exit.rank*.json"))]
    return [report for path in paths if (report := read_model(path, ExitReport)) is not None]


def lock_was_released(run_dir: Path) -> bool:
    """Return whether the run released its lock. Only a kill ends a run without that. False without a lock file."""
    try:
        info = (run_dir / "run.lock").stat()
    except OSError:
        return False
    return not info.st_size and time.time() - info.st_mtime > _LOCK_WRITE_TIMEOUT_S
