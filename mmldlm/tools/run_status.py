"""State of a run, from its exit reports, lock file and start-up report, and from the processes of this machine."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from mmldlm.errors import ExitCode
from mmldlm.tools.records import check_values

StateName = Literal["running", "silent", "finished", "stopped", "failed", "killed"]
ACTIVE_STATES = ("running", "silent")  # the other states are of runs that have ended

_LOCK_WRITE_TIMEOUT_S = 5.0  # a new lock file may be empty for so long, until its owner is written into it
_CLOCK_TOLERANCE_S = 60.0  # a process may seem to be younger than the files it wrote if a clock was set


@dataclass(frozen=True)
class RunState:
    """State of a run.

    Attributes:
        name: `silent` is a run that seems to be active, but has no news; `killed` one whose process is gone without an
            exit report.
    """

    name: StateName
    code: int | None = None
    cause: str = ""

    @property
    def is_active(self) -> bool:
        """True if the run has not ended."""
        return self.name in ACTIVE_STATES


@dataclass(frozen=True)
class ExitReport:
    """Exit report of a rank, as in `exit.json`."""

    rank: int
    code: int
    step: int
    cause: str
    time: float

    @property
    def is_clean(self) -> bool:
        """True if the rank finished, or was stopped and saved."""
        return self.code in (ExitCode.DONE, ExitCode.STOPPED)


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank.

    It existed at `seen_at`, in Unix seconds: a process that was created later only reuses its pid.
    """

    rank: int
    host: str
    pid: int
    seen_at: float

    def state(self) -> Literal["elsewhere", "running", "stopped", "gone"]:
        """Return the state on this machine; "stopped" is SIGSTOP or a debugger."""
        if self.host != socket.gethostname():
            return "elsewhere"
        try:
            process = psutil.Process(self.pid)
            if process.create_time() > self.seen_at + _CLOCK_TOLERANCE_S:
                return "gone"
            status = process.status()
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:  # a process of another user, on systems that hide those
            return "running"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def read_exits(run_dir: Path) -> list[ExitReport]:
    """Return the exit reports of the ranks, starting with `exit.json`, which is the report of the run."""
    reports = [_read_exit(path) for path in [run_dir / "exit.json", *sorted(run_dir.glob("exit.rank*.json"))]]
    return [report for report in reports if report is not None]


def _read_exit(path: Path) -> ExitReport | None:
    record = read_json(path)
    try:
        return ExitReport(
            int(record["rank"]), int(record["code"]), int(record["step"]), str(record["cause"]), float(record["time"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_lock_owner(run_dir: Path) -> RankProcess | None:
    """Return rank 0 as named in the run's lock file; None if the run has ended cleanly or has no such file."""
    record = read_json(run_dir / "run.lock")
    try:
        started = datetime.fromisoformat(record["started"]).timestamp()
        return RankProcess(0, str(record["host"]), int(record["pid"]), started)
    except (KeyError, TypeError, ValueError):
        return None


def lock_was_released(run_dir: Path) -> bool:
    """Return whether the run's lock was released, as at every end but a kill; False without a lock file."""
    try:
        info = (run_dir / "run.lock").stat()
    except OSError:
        return False
    return not info.st_size and time.time() - info.st_mtime > _LOCK_WRITE_TIMEOUT_S


def read_processes(run_dir: Path, lock_owner: RankProcess | None) -> list[RankProcess]:
    """Return the processes of all ranks if the start-up report is of the lock owner's start, otherwise only the owner.

    Without a lock owner there are none.
    """
    if lock_owner is None:
        return []
    path = run_dir / "startup.json"
    try:
        written_at = path.stat().st_mtime
        ranks = [(str(rank["host"]), int(rank["pid"])) for rank in read_json(path)["ranks"]]
    except (OSError, KeyError, TypeError, ValueError):
        return [lock_owner]
    if ranks[:1] != [(lock_owner.host, lock_owner.pid)]:  # the report is of an earlier start
        return [lock_owner]
    return [lock_owner, *(RankProcess(rank, host, pid, written_at) for rank, (host, pid) in enumerate(ranks) if rank)]


def read_json(path: Path, is_report: bool = False) -> Mapping[str, Any]:
    """Return the JSON object in `path`; empty if the file is missing, torn or no JSON object, or no start's report."""
    try:
        content = json.loads(path.read_bytes())
        if is_report:
            check_values(content)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
