"""The end of a process: whether it still runs, and the files that it leaves in the run folder.

These are its exit record, the stacks of its threads, and its last collectives (`flight_recorder.py`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mmldlm.errors import ExitCode

EXIT_FILE = "exit.json"
CLEAN_EXIT_CODES = (ExitCode.DONE, ExitCode.STOPPED)
_PATTERNS = (EXIT_FILE, "exit.rank*.json", "stacks.rank*.txt", "flight_recorder.rank*.json", "nccl_trace.rank*")

KILL_TIMEOUT_S = 2.0  # for a process to end before we kill it


@dataclass(frozen=True)
class ProcessInfo:
    """A process on any host. `machine` and `start_time` tell it apart from others with the same pid."""

    host: str
    machine: str
    pid: int
    start_time: int

    @classmethod
    def current(cls) -> ProcessInfo:
        """Return this process."""
        return cls(socket.gethostname(), machine_id(), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> Literal["", "running", "stopped", "gone"]:
        """Return the state of the process in the kernel, or "" if it runs on another machine."""
        if self.machine != machine_id():
            return ""
        letter, start_time = _stat(self.pid)
        # Z: zombie, X: dead, T: stopped by a signal, t: stopped by a tracer. A new start time means a reused pid.
        if start_time != self.start_time or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def kill_processes(processes: Iterable[ProcessInfo]) -> None:
    """SIGKILL processes of this machine that do not end within `KILL_TIMEOUT_S`, but no other with the same pid."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for process in processes:
        # Only a running process may end by itself. A stopped one is killed at once.
        while process.state() == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.state() in ("running", "stopped"):
            with suppress(OSError):
                handle = os.pidfd_open(process.pid)
                try:
                    if process.state() != "gone":  # check again: from now on, the handle belongs to this process
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)


@cache
def machine_id() -> str:
    """Identify the running kernel and process namespace, since hosts and containers may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, int]:
    """Return state letter and start time in ticks since boot, or ("X", 0) if there is no such process."""
    try:
        # The process name before the last ")" may contain spaces and parentheses. After it come field 3, the state
        # letter, and all later ones. Field 22 is the start time.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def clear_exit_files(folder: Path) -> None:
    """Remove exit files of earlier runs, which could be mistaken for files of this run."""
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_exit(folder: Path, rank: int, step: int, code: int, cause: str) -> None:
    """Write a rank's exit record.

    `exit.json` holds the first failure of any rank, or rank 0's record if none failed. Other records are
    `exit.rankN.json`. Where hard links exist, records appear atomically. We ignore an OSError here, so that it does not
    hide the cause.
    """
    record = {"code": int(code), "rank": rank, "step": step, "cause": cause, "time": time.time()}
    first_path, rank_path = folder / EXIT_FILE, folder / f"exit.rank{rank}.json"
    temporary = folder / f".exit.rank{rank}.tmp"
    is_clean = code in CLEAN_EXIT_CODES
    with suppress(OSError):
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        try:
            if is_clean and rank:
                temporary.replace(rank_path)
            elif not _link_if_absent(temporary, first_path):
                first = json.loads(first_path.read_text(encoding="utf-8"))
                if not is_clean and first["code"] in CLEAN_EXIT_CODES:  # a failure replaces a clean exit
                    # Link it before replacing it, so that the clean record always has a name.
                    _link_if_absent(first_path, folder / f"exit.rank{first['rank']}.json")
                    temporary.replace(first_path)
                elif first["rank"] != rank:  # only a rank's first record counts
                    temporary.replace(rank_path)
        finally:
            temporary.unlink(missing_ok=True)


def _link_if_absent(source: Path, target: Path) -> bool:
    """Copy `source` to `target`, atomically if hard links exist. Return False if `target` exists already."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    return True


def dump_stacks(folder: Path, rank: int, header: str, error: BaseException | None = None) -> None:
    """Append the stacks of all threads and the traceback of `error` to `stacks.rankN.txt`."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError), (folder / f"stacks.rank{rank}.txt").open("a", encoding="utf-8") as file:
        file.write(f"--- {now}, rank {rank}, process {os.getpid()}, {header}\n")
        if error is not None:
            file.writelines(traceback.format_exception(error))
        file.write("\n")
        # faulthandler writes to the descriptor and bypasses the buffer of `file`.
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
