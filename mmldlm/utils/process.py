"""The surroundings of a process: its standard streams, its launcher, and the signals that end it."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from mmldlm.errors import StoppedBySignal, run_command
from mmldlm.utils.malloc import configure_cuda_allocator
from mmldlm.utils.versions import check_versions

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU)
# One variable per launcher. A process without any was started from a shell, and may outlive it.
_LAUNCHER_VARIABLES = {"TORCHELASTIC_RUN_ID", "CROSS_RANK", "ACCELERATE_MIXED_PRECISION"}
_LAUNCHERS = {"accelerate", "deepspeed", "torch", "torchrun"}  # scripts or packages that Python runs
CONTINUE = "start the same command again to continue"
_IMPORT_S = 1.0
_launcher_ended = threading.Event()
_stops: list[StoppedBySignal] = []  # stops of the current stop_at_signals


def start_process(outlives_terminal: bool) -> None:
    """Prepare this process for the end of its terminal and of its launcher, before torch is imported.

    A command with `outlives_terminal` makes files, so it goes on when nobody reads its output any more.
    """
    # Otherwise the next files we open would take the numbers of closed streams, and receive libraries' output.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or outlives_terminal:
            options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "line_buffering": True}
            if stream is not None:  # stderr writes through, and a buffer would delay it
                lines = stream.line_buffering or stream.write_through
                options = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": lines}
            buffer = io.BufferedWriter(_LossyStream(number, "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, **options))
    if _LAUNCHER_VARIABLES & os.environ.keys() and hasattr(os, "pidfd_open"):
        # The parent is read here: once the thread runs, it may have ended and another one may have taken its place.
        threading.Thread(target=_stop_with_launcher, args=(os.getppid(),), daemon=True).start()


def start_rank() -> None:
    """Prepare a process that a launcher started as a module: `start_process`, versions and allocator, before torch."""
    start_process(outlives_terminal=True)
    if status := run_command(check_versions):
        sys.exit(status)
    configure_cuda_allocator(os.environ)


class _LossyStream(io.FileIO):
    """A standard stream that drops output it cannot write: the reader or terminal is gone, or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _stop_with_launcher(parent_pid: int) -> None:
    """Stop this process when its launcher ends. Otherwise it would train on and hold the run folder.

    `parent_pid` is the parent at the start of this process.
    """
    import psutil  # imported here, because sampling from a bundle does not need it

    process = psutil.Process()
    parents: list[Any] = []
    words: list[set[str]] = []
    with suppress(psutil.Error):  # hidden from this process
        while (parent := (parents or [process])[-1].parent()) is not None:
            words.append({Path(word).name for word in parent.cmdline()[:5]})
            parents.append(parent)
    is_python = [any(word.startswith("python") for word in names) for names in words]
    # Launchers are Python programs that import torch, for a second, before they start anything. If we have no such
    # parent, our launcher has ended and left us to init, unless we are the first process of a new container.
    if any(is_python) or not parents or process.create_time() - parents[0].create_time() < _IMPORT_S:
        # Under deepspeed, one launcher starts another, which starts the ranks.
        launchers = [
            place
            for place, names in enumerate(words)
            if is_python[place] and {word.split(".")[0] for word in names} & _LAUNCHERS
        ]
        try:
            handles = [os.pidfd_open(parent.pid) for parent in parents[: max(launchers, default=0) + 1]]
            if os.getppid() == parent_pid:
                select.select(handles, [], [])
        except ProcessLookupError:  # the launcher has just ended
            pass
        except OSError:  # not permitted here
            return
    _launcher_ended.set()
    sys.stderr.write("mmldlm: the launcher has ended, so this process stops\n")
    os.kill(os.getpid(), signal.SIGTERM)


def ignores_hangup() -> bool:
    """Return whether this process was started to outlive its terminal, for example by nohup.

    Under torchrun (also accelerate's) it never is: torchrun forwards SIGHUP even under nohup, and soon kills processes
    that do not end.
    """
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and "TORCHELASTIC_RUN_ID" not in os.environ


def stop_reason(number: int) -> str:
    """Name the sender of a signal to stop."""
    return "the end of its launcher" if _launcher_ended.is_set() else signal.Signals(number).name


@contextmanager
def stop_at_signals(advice: str) -> Iterator[None]:
    """Raise StoppedBySignal, whose message ends with `advice`, when SIGTERM, SIGHUP or SIGXCPU arrives in the body.

    The exception may get lost: Python drops exceptions within destructors, and libraries catch any error of an import.
    See `raise_if_stopped`.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _stops.append(StoppedBySignal(f"stopped by {stop_reason(number)}; {advice}"))
        raise _stops[-1]

    numbers = [signal.SIGTERM, signal.SIGXCPU, *([] if ignores_hangup() else [signal.SIGHUP])]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _stops.clear()


def raise_if_stopped() -> None:
    """Raise the StoppedBySignal of `stop_at_signals` again if it got lost. Long loops call this."""
    if _stops:
        raise _stops[-1]
