"""How processes end: whether one is still there, and what it leaves in the run folder.

That is its exit record, the stacks of its threads, and its last collectives.
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
from typing import Any, Literal

import torch

from mmldlm.errors import ExitCode

FIRST = "exit.json"
GOOD_ENDS = (ExitCode.DONE, ExitCode.STOPPED)
_PATTERNS = (FIRST, "exit.rank*.json", "stacks.rank*.txt", "flight_recorder.rank*.json")

PATIENCE_S = 2.0  # for a process that is to end to do so by itself


@dataclass(frozen=True)
class Process:
    """A process of any host; `machine` and `start_time` tell it from another that has the same number."""

    host: str
    machine: str
    pid: int
    start_time: int

    @classmethod
    def own(cls) -> Process:
        return cls(socket.gethostname(), machine_id("pid"), os.getpid(), _stat(os.getpid())[1])

    @property
    def is_here(self) -> bool:
        return self.machine == machine_id("pid")

    def state(self) -> Literal["", "running", "stopped", "gone"]:
        """As the kernel has it; "" for a process of another machine."""
        if not self.is_here:
            return ""
        letter, start_time = _stat(self.pid)
        if start_time != self.start_time or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def kill_processes(processes: Iterable[Process]) -> None:
    """SIGKILL those of this machine that do not end by themselves; never a process that only has the same number."""
    patience_ends = time.monotonic() + PATIENCE_S
    for process in processes:
        while process.state() == "running" and time.monotonic() < patience_ends:
            time.sleep(0.02)
        if process.state() in ("running", "stopped"):
            with suppress(OSError):
                handle = os.pidfd_open(process.pid)
                try:
                    if process.state() != "gone":  # so the handle is of the process that is meant
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)


@cache
def machine_id(namespace: Literal["pid", "net"]) -> str:
    """One running kernel and one of its process or network namespaces: hosts and containers may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns', namespace).readlink()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time in ticks since boot; ("X", 0) where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


def clear_exit_files(folder: Path) -> None:
    """At the start of a run: what earlier runs left is not to be taken for the words of this one."""
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def write_exit(folder: Path, rank: int, step: int, code: int, cause: str) -> None:
    """`exit.json` is the first failure of any rank, or else the good end of rank 0; others are `exit.rankN.json`.

    A reader sees all of a record or none. A disk that refuses is no second error.
    """
    record = {"code": int(code), "rank": rank, "step": step, "cause": cause, "time": time.time()}
    first, own = folder / FIRST, folder / f"exit.rank{rank}.json"
    temporary = folder / f".exit.rank{rank}.tmp"
    good = code in GOOD_ENDS
    with suppress(OSError):
        temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
        try:
            if good and rank:
                temporary.replace(own)
            elif not _place(temporary, first):
                held = json.loads(first.read_text(encoding="utf-8"))
                if not good and held["code"] in GOOD_ENDS:  # the run did not end well after all
                    _place(first, folder / f"exit.rank{held['rank']}.json")
                    temporary.replace(first)
                elif held["rank"] != rank:  # a rank's first words count
                    temporary.replace(own)
        finally:
            temporary.unlink(missing_ok=True)


def _place(source: Path, target: Path) -> bool:
    """Whether `target` was not there before; it then appears whole, and of several writers one wins."""
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
    """Append the stacks of all threads, and the traceback of `error`, to `stacks.rankN.txt`."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with suppress(OSError), (folder / f"stacks.rank{rank}.txt").open("a", encoding="utf-8") as file:
        file.write(f"--- {now}, rank {rank}, process {os.getpid()}, {header}\n")
        if error is not None:
            file.writelines(traceback.format_exception(error))
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def dump_flight_recorder(folder: Path, rank: int) -> None:
    """Write torch's record of the latest collectives to `flight_recorder.rankN.json`, if it keeps one."""
    dump = _flight_record()
    if dump.get("entries"):
        with suppress(OSError):
            (folder / f"flight_recorder.rank{rank}.json").write_text(json.dumps(dump), encoding="utf-8")


def pending_collective(or_latest: bool) -> str:
    """The oldest collective that was started and not completed, as torch's flight recorder has it; "" if unknown.

    A failed gloo collective counts as completed there, so after an error the latest one is meant.
    """
    entries = _flight_record().get("entries", [])
    pending = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    chosen = pending[:1] or (entries[-1:] if or_latest else [])
    return "".join(
        f"{entry['profiling_name']} number {entry['collective_seq_id']}, sizes {entry['input_sizes']}"
        for entry in chosen
    )


def _flight_record() -> dict[str, Any]:
    with suppress(AttributeError, RuntimeError, ValueError):
        return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))  # type: ignore[attr-defined]
    return {}
