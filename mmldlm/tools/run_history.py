"""Records and state of a run, read from its folder, live or afterwards. This module imports no torch."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mmldlm.errors import ConfigError, DataError, ExitCode, StorageError
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.records import Record, parse_record
from mmldlm.tools.run_status import (
    ExitReport,
    RankProcess,
    RunState,
    StateName,
    lock_was_released,
    read_exits,
    read_json,
    read_lock_owner,
    read_processes,
)
from mmldlm.utils.format import human_duration

CURVE_KINDS = ("train", "validation")  # kinds of records that are points of curves
RECENT_RECORDS = 50  # training records from which typical values are computed

# The last bytes read are compared at each refresh, to notice that the file was replaced. They contain the times of
# records, so no other file has the same.
_TAIL_BYTES = 512

_CLEAN_EXITS: Mapping[int, StateName] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


class Series(NamedTuple):
    """A value over the steps; NaN where it was not finite. `times` are the Unix seconds of the records."""

    steps: list[int]
    values: list[float]
    times: list[float]


@dataclass
class _Column:
    """Values of a tag in the records that were read so far; `session` is where the finite ones of the session begin."""

    series: Series = field(default_factory=lambda: Series([], [], []))
    finite: list[float] = field(default_factory=list)
    seen: int = 0
    session: int = 0


class History:
    """The contents of `run_dir` at the last `refresh`; if it is not a run folder, that is a `DataError`.

    Attributes:
        exits: Exit reports of the ranks, the one of the run first.
        processes: Processes of a run that has not ended cleanly, by rank.
    """

    def __init__(self, run_dir: Path | str):
        self.run_dir = Path(run_dir)
        if not any((self.run_dir / name).exists() for name in ("metrics.jsonl", "run.lock", "exit.json")):
            raise DataError(f"{self.run_dir} is no run folder: expected metrics.jsonl in it, found no such file")
        self._reader = MetricsReader(self.run_dir / "metrics.jsonl")
        self._last_change_at = -math.inf
        self._columns_of: list[Record] = []
        self._columns: dict[tuple[str, tuple[str, ...]], _Column] = {}
        self.exits: list[ExitReport] = []
        self.processes: list[RankProcess] = []
        self._update(first=True)

    def refresh(self) -> bool:
        """Read the folder again and return whether there are new records."""
        # Cached properties, which a new start of the run may have changed.
        for name in ("config", "startup"):
            self.__dict__.pop(name, None)
        return self._update(first=False)

    def _update(self, first: bool) -> bool:
        # Records are read last: a process that has ended has written all of them, so an end is never seen without them.
        self.exits = read_exits(self.run_dir)
        self.processes = read_processes(self.run_dir, read_lock_owner(self.run_dir))
        is_gone = bool(self.processes) and self.processes[0].state() == "gone"
        has_news = self._reader.refresh()
        if has_news and not first:
            self._last_change_at = time.time()
        if (is_gone or not self.processes) and not self.exits:  # it may have ended and reported since the first look
            self.exits = read_exits(self.run_dir)
        self._is_gone, self._lock_was_released = is_gone, lock_was_released(self.run_dir)
        return has_news

    # --- records ------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        """All records that no resume superseded, in the order in which they were written; NaN where not finite."""
        return self._reader.records

    @property
    def damaged(self) -> int:
        """Number of lines that are not records, without a last line that is still being written."""
        return self._reader.damaged

    def by_kind(self, *kinds: str) -> list[Record]:
        """Return the records of these kinds, which `telemetry/metrics.py` lists."""
        if len(kinds) == 1:
            return self._reader.by_kind[kinds[0]]
        return [record for record in self.records if record["kind"] in kinds]

    def durations_s(self, activity: str) -> list[float]:
        """Return the seconds of each time that a heartbeat announced the activity, to the next record of any kind."""
        return self._reader.durations_s[activity]

    def _column(self, tag: str, kinds: tuple[str, ...]) -> _Column:
        """Return the values of `tag`, read from the records since the last call."""
        records = self._reader.records
        if self._columns_of is not records:  # some were superseded
            self._columns_of, self._columns = records, defaultdict(_Column)
        column = self._columns[tag, kinds]
        for record in records[column.seen :]:
            if record["kind"] in ("start", "resume"):
                column.session = len(column.finite)
            if record["kind"] in kinds and record.get(tag) is not None:
                value = float(record[tag])
                column.series.steps.append(record["step"])
                column.series.values.append(value)
                column.series.times.append(record["time"])
                if math.isfinite(value):
                    column.finite.append(value)
        column.seen = len(records)
        return column

    def series(self, tag: str, *kinds: str) -> Series:
        """Return the values of the metric `tag` in records of `kinds` (default: training and validation)."""
        return self._column(tag, kinds or CURVE_KINDS).series

    def finite(self, tag: str, session: bool = False) -> list[float]:
        """Return the finite values of the metric `tag` in training records.

        With `session`, only of the latest start or resume, without the first, whose speed includes the start.
        """
        column = self._column(tag, ("train",))
        return column.finite[column.session + 1 :] if session else column.finite

    def tags(self, *kinds: str) -> list[str]:
        """Return the tags (`group/name`) with a series in records of `kinds`, in order of first appearance."""
        kinds = kinds or CURVE_KINDS
        records = (record for record in self.records if record["kind"] in kinds)
        return list(dict.fromkeys(key for one in records for key in one if "/" in key and one[key] is not None))

    def last(self, *kinds: str) -> Record | None:
        """Return the latest record, of `kinds` if they are given."""
        places = [self._reader.last_places.get(kind, -1) for kind in kinds] if kinds else [len(self.records) - 1]
        return self.records[place] if (place := max(places)) >= 0 else None

    def session(self, kind: str) -> list[Record]:
        """Return the records of a kind since the latest start or resume."""
        return self.by_kind(kind)[self._reader.session_begins.get(kind, 0) :]

    # --- the run ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.run_dir.resolve().name

    @property
    def step(self) -> int:
        """The last step with a record of any kind."""
        return self._reader.step

    @property
    def total_steps(self) -> int | None:
        """`train.steps` of the latest start or resume; None before it."""
        started = self.last("start", "resume")
        return None if started is None else started.get("total_steps")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the latest start, nested as in its file; empty if the file cannot be read."""
        try:
            return read_yaml(self.run_dir / "config.yaml")
        except ConfigError:
            return {}

    @cached_property
    def startup(self) -> Mapping[str, Any]:
        """The start-up report of the latest start that has written one; empty without one."""
        return read_json(self.run_dir / "startup.json", is_report=True)

    # --- time ---------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Typical seconds of a step, including waits for data but not validations and saves."""
        finite = self.finite("speed/step_s")[-RECENT_RECORDS:]
        return statistics.median(finite) if finite else None

    @property
    def steps_per_record(self) -> int:
        """Typical number of steps from one training record to the next."""
        steps = [record["step"] for record in self.by_kind("train")[-RECENT_RECORDS:]]
        gaps = [later - earlier for earlier, later in pairwise(steps) if later > earlier]
        # A single record counts the steps from the start.
        return round(statistics.median(gaps)) if gaps else max(steps[-1:], default=1)

    def news_age_s(self, now: float | None = None) -> float | None:
        """Return the seconds since the latest record; None without records.

        The clock of the run's machine may differ: a record that arrived between two refreshes is never older than the
        refresh that read it.
        """
        latest = self.last()
        if latest is None:
            return None
        return max(0.0, (time.time() if now is None else now) - max(latest["time"], self._last_change_at))

    def state(self, now: float | None = None, stall_timeout_s: float = math.inf) -> RunState:
        """Return the state of the run at `now` in Unix seconds, by default the present.

        An active run counts as silent if its latest record is older than `stall_timeout_s`.
        """
        if self.exits:
            exit_report = self.exits[0]
            return RunState(_CLEAN_EXITS.get(exit_report.code, "failed"), exit_report.code, exit_report.cause)
        latest = self.last()
        if (not self.processes or self._is_gone) and latest is not None and latest["kind"] == "end":
            stopped_by = latest.get("stopped_by")
            if stopped_by:
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


class MetricsReader:
    """The records of one metrics file, without those that a resume superseded.

    The file may be missing, grow, end in a torn line, or be replaced, as a resume does. A line that is not a record is
    skipped and counted in `damaged` instead of raising an error.

    Attributes:
        last_places: Place of the last record of each kind.
        session_begins: Number of records of each kind before the latest start or resume.
        durations_s: Seconds of each activity that a heartbeat has announced, to the next record of any kind.
        damaged: Number of lines that are not records.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self._keep([])
        self.damaged = 0
        self._offset, self._tail, self._partial_line = 0, b"", b""

    def _keep(self, records: list[Record]) -> None:
        self.records: list[Record] = []
        self.by_kind: dict[str, list[Record]] = defaultdict(list)
        self.last_places: dict[str, int] = {}
        self.session_begins: dict[str, int] = {}
        self.durations_s: dict[str, list[float]] = defaultdict(list)
        self.step = 0
        for record in records:
            self._add(record)

    def _add(self, record: Record) -> None:
        if self.records and (before := self.records[-1])["kind"] == "heartbeat":
            self.durations_s[before["what"]].append(record["time"] - before["time"])
        if record["kind"] in ("start", "resume"):
            self.session_begins = {kind: len(records) for kind, records in self.by_kind.items()}
        self.last_places[record["kind"]] = len(self.records)
        self.step = max(self.step, record["step"])
        self.records.append(record)
        self.by_kind[record["kind"]].append(record)

    def refresh(self) -> bool:
        """Read what was added and return whether anything changed; if the file cannot be read, raise `StorageError`."""
        try:
            with self.path.open("rb") as file:
                return self._read_added(file)
        except FileNotFoundError:
            had_records = bool(self.records)
            self._reset()
            return had_records
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None

    def _read_added(self, file: BinaryIO) -> bool:
        # A shorter or another file does not have the tail that was read before.
        file.seek(self._offset - len(self._tail))
        replaced = file.read(len(self._tail)) != self._tail
        if replaced:
            self._reset()
            file.seek(0)
        added = file.read()
        if not added:
            return replaced
        self._offset += len(added)
        self._tail = (self._tail + added)[-_TAIL_BYTES:]
        # What follows the last newline is completed by a later refresh.
        *lines, self._partial_line = (self._partial_line + added).split(b"\n")
        for line in lines:
            self._add_line(line)
        return True

    def _add_line(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            self.damaged += bool(line.strip())
            return
        if record["kind"] in ("start", "resume") and self.step > record["step"]:  # later steps are trained again
            self._keep([old for old in self.records if old["step"] <= record["step"]])
        self._add(record)
