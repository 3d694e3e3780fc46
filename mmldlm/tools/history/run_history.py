"""`History`: what the folder of a run says about it, for all who show runs. It imports no torch, and may look live."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm.errors import ConfigError, DataError, ExitCode
from mmldlm.settings.yaml import read_yaml
from mmldlm.tools.history.metrics_reader import Record, Records
from mmldlm.tools.history.run_status import (
    Exit,
    Name,
    Process,
    State,
    read_exits,
    read_holder,
    read_json,
    read_processes,
    was_released,
)

CURVES = ("train", "validation")  # the kinds of records that are points of curves
RECENT = 50  # training records over which what is usual is taken

_GOOD_ENDS: Mapping[int, Name] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped"}


class Series(NamedTuple):
    """A value over the steps; NaN where it was not finite."""

    steps: list[int]
    values: list[float]
    times: list[float]  # unix seconds at which it was written


class History:
    """What `run_dir` held when `refresh` last looked.

    Raises:
        DataError: there is no run in that folder.
    """

    def __init__(self, run_dir: Path | str):
        self.run_dir = Path(run_dir)
        if not any((self.run_dir / name).exists() for name in ("metrics.jsonl", "run.lock", "exit.json")):
            raise DataError(f"{self.run_dir} is no run folder: expected metrics.jsonl in it, found no such file")
        self._records = Records(self.run_dir / "metrics.jsonl")
        self._heard_at = -math.inf
        self.exits: list[Exit] = []
        self.processes: list[Process] = []  # by rank, of a run that has not ended in good order
        self._look(first=True)

    @classmethod
    def read(cls, run_dir: Path | str) -> History:
        return cls(run_dir)

    def refresh(self) -> bool:
        """Look again; whether there are new records."""
        for name in ("config", "startup"):
            self.__dict__.pop(name, None)
        return self._look(first=False)

    def _look(self, first: bool) -> bool:
        # Records last: whoever has ended has written all of them, so an end without its last records is never seen.
        self.exits = read_exits(self.run_dir)
        self.processes = read_processes(self.run_dir, read_holder(self.run_dir))
        gone = bool(self.processes) and self.processes[0].state() == "gone"
        news = self._records.refresh()
        if news and not first:
            self._heard_at = time.time()
        if (gone or not self.processes) and not self.exits:  # it may have ended in between, with its words
            self.exits = read_exits(self.run_dir)
        self._gone, self._released = gone, was_released(self.run_dir)
        return news

    # --- records ------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Record]:
        """All that no resume superseded, in the order in which they were written; what was not finite is NaN."""
        return self._records.all

    @property
    def damaged(self) -> int:
        """Lines that are no records; a last line that is still being written is none of them."""
        return self._records.damaged

    def of(self, *kinds: str) -> list[Record]:
        """The records of these kinds, which `telemetry/metrics.py` lists."""
        return [record for record in self.records if record["kind"] in kinds]

    def series(self, tag: str, *kinds: str) -> Series:
        """The values of `tag` in records of `kinds`, which are those of training and validation unless given."""
        found = [
            (record["step"], float(record[tag]), record["time"])
            for record in self.of(*(kinds or CURVES))
            if isinstance(record.get(tag), int | float)
        ]
        return Series(*map(list, zip(*found, strict=True))) if found else Series([], [], [])

    def tags(self, *kinds: str) -> list[str]:
        """The tags, `group/name`, that have a series in records of `kinds`, in the order of their first appearance."""
        found: dict[str, None] = {}
        for record in self.of(*(kinds or CURVES)):
            found.update(dict.fromkeys(key for key, v in record.items() if "/" in key and isinstance(v, int | float)))
        return list(found)

    def last(self, *kinds: str) -> Record | None:
        """The latest record, of `kinds` if they are given."""
        return next((record for record in reversed(self.records) if not kinds or record["kind"] in kinds), None)

    @property
    def session(self) -> list[Record]:
        """The records since the latest start or resume."""
        records = self.records
        for index in reversed(range(len(records))):
            if records[index]["kind"] in ("start", "resume"):
                return records[index:]
        return records

    # --- the run ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def step(self) -> int:
        """The last step of which anything is known."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def total_steps(self) -> int | None:
        started = self.last("start", "resume")
        return None if started is None else started.get("total_steps")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the latest start, nested as in its file; empty where that cannot be read."""
        try:
            return read_yaml(self.run_dir / "config.yaml")
        except ConfigError:
            return {}

    @cached_property
    def startup(self) -> Mapping[str, Any]:
        """The start-up report of the latest start that came so far; empty where there is none."""
        return read_json(self.run_dir / "startup.json")

    # --- time ---------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Seconds that a step usually takes, the waits for data included, validations and saves not."""
        steps = [record.get("speed/step_s") for record in self.of("train")[-RECENT:]]
        known = [value for value in steps if isinstance(value, int | float) and math.isfinite(value)]
        return statistics.median(known) if known else None

    @property
    def steps_between(self) -> int:
        """Steps that usually lie between two training records."""
        steps = [record["step"] for record in self.of("train")[-RECENT:]]
        gaps = [later - earlier for earlier, later in pairwise(steps) if later > earlier]
        return round(statistics.median(gaps)) if gaps else max(steps[-1:], default=1)

    def news_age_s(self, now: float | None = None) -> float | None:
        """Seconds since the latest record; None where there is none. What came while we looked is as old as that."""
        latest = self.last()
        if latest is None:
            return None
        return max(0.0, (time.time() if now is None else now) - max(latest["time"], self._heard_at))

    def state(self, now: float | None = None, patience_s: float = math.inf) -> State:
        """How the run stands; it is silent where it should go on, but the latest record is older than `patience_s`."""
        if self.exits:
            words = self.exits[0]
            return State(_GOOD_ENDS.get(words.code, "failed"), words.code, words.cause)
        latest = self.last()
        if (not self.processes or self._gone) and latest is not None and latest["kind"] == "end":
            by = latest.get("stopped_by")
            return State("stopped", cause=f"stopped by {by}") if by else State("finished", cause="finished")
        if self._gone:
            return State("killed", cause=f"process {self.processes[0].pid} is gone and left no exit.json")
        if self._released:
            return State("failed", cause="ended, but could not leave an exit.json: the disk may be full")
        age = self.news_age_s(now)
        if age is not None and age > patience_s:
            return State("silent", cause=f"no news for {age:.0f} s")
        return State("running")
