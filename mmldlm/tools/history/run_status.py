"""How a run stands or ended, from what its processes left in its folder, and from those that are on this machine."""

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

Name = Literal["running", "silent", "finished", "stopped", "failed", "killed"]
OPEN = ("running", "silent")  # the other names are of runs that have ended

_OPENING_S = 5.0  # that a lock file may be empty before its holder is written into it
_CLOCK_SLACK_S = 60.0  # by which a process may seem to be younger than what it wrote, where a clock was set


@dataclass(frozen=True)
class State:
    """`silent`: nothing speaks against its running, but there is no news. `killed`: gone, without a word."""

    name: Name
    code: int | None = None  # exit code, of a run that left one
    cause: str = ""

    @property
    def is_open(self) -> bool:
        return self.name in OPEN


@dataclass(frozen=True)
class Exit:
    """The words with which a rank ended."""

    rank: int
    code: int
    step: int
    cause: str
    time: float

    @property
    def is_good(self) -> bool:
        return self.code in (ExitCode.DONE, ExitCode.STOPPED)


@dataclass(frozen=True)
class Process:
    """A process of a run; `known_at`, in unix seconds, it was there, so a younger one only has its number."""

    rank: int
    host: str
    pid: int
    known_at: float

    def state(self) -> Literal["elsewhere", "running", "stopped", "gone"]:
        """As this machine has it; "stopped" is SIGSTOP or a debugger."""
        if self.host != socket.gethostname():
            return "elsewhere"
        try:
            process = psutil.Process(self.pid)
            if process.create_time() > self.known_at + _CLOCK_SLACK_S:
                return "gone"
            status = process.status()
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:  # of another user, where such are hidden
            return "running"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "gone"
        return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def read_exits(run_dir: Path) -> list[Exit]:
    """Last words of the ranks, those of `exit.json`, which are the run's, first."""
    found = [_exit(path) for path in [run_dir / "exit.json", *sorted(run_dir.glob("exit.rank*.json"))]]
    return [words for words in found if words is not None]


def _exit(path: Path) -> Exit | None:
    record = read_json(path)
    try:
        return Exit(
            int(record["rank"]), int(record["code"]), int(record["step"]), str(record["cause"]), float(record["time"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def read_holder(run_dir: Path) -> Process | None:
    """Rank 0 by the run's lock file; None where the run has ended in good order, or has no such file."""
    record = read_json(run_dir / "run.lock")
    try:
        started = datetime.fromisoformat(record["started"]).timestamp()
        return Process(0, str(record["host"]), int(record["pid"]), started)
    except (KeyError, TypeError, ValueError):
        return None


def was_released(run_dir: Path) -> bool:
    """Whether the run's lock was given back, as at every end but a kill; False where there is no lock file."""
    try:
        found = (run_dir / "run.lock").stat()
    except OSError:
        return False
    return not found.st_size and time.time() - found.st_mtime > _OPENING_S


def read_processes(run_dir: Path, holder: Process | None) -> list[Process]:
    """Those of all ranks, if the start-up report is by `holder`; otherwise `holder` alone, if there is one."""
    if holder is None:
        return []
    path = run_dir / "startup.json"
    try:
        written = path.stat().st_mtime
        ranks = [(str(rank["host"]), int(rank["pid"])) for rank in read_json(path)["ranks"]]
    except (OSError, KeyError, TypeError, ValueError):
        return [holder]
    if ranks[:1] != [(holder.host, holder.pid)]:  # it is of an earlier start
        return [holder]
    return [holder, *(Process(rank, host, pid, written) for rank, (host, pid) in enumerate(ranks) if rank)]


def read_json(path: Path) -> Mapping[str, Any]:
    """A mapping in JSON; empty where the file is missing, torn or something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
