"""Worker processes of a DataLoader: their failures become a `DataError`, and no worker outlives its run."""

from __future__ import annotations

import atexit
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.data import DataLoader, _utils

from mmldlm.errors import DataError
from mmldlm.utils.process import STOP_SIGNALS

T = TypeVar("T")
_SHARED, _ENOUGH_SHARED_MIB = Path("/dev/shm"), 1024  # noqa: S108 - torch passes batches through it
_KILL_TIMEOUT_S = 2.0  # to join killed workers. A worker that hangs in the kernel stays until its file system answers


class _Interrupt(BaseException):
    """Raised by signal handlers, with the error that it stands for.

    It is not an `Exception`: torch would handle that by waiting for a lock that a dead worker may hold.
    """


def read_batches(loader: DataLoader[T | DataError], check_files: Callable[[], None]) -> Iterator[T]:
    """Yield the items of `loader`, and raise an item that is a `DataError`.

    We also raise a `DataError`, after killing all workers, if a worker died, raised, or returned nothing within the
    loader's timeout. `check_files` raises one for a truncated file, which usually is what killed a worker that had
    mapped it.
    """
    workers: list[BaseProcess] = []
    items: Any = None
    try:
        items = iter(loader)
        workers = getattr(items, "_workers", workers)  # torch has no public access to them
        atexit.register(_kill, workers)  # before multiprocessing's own handler, which sends SIGTERM and joins
        while True:
            with _watch(workers, loader.timeout):
                try:
                    item = next(items)
                except StopIteration:
                    return
            if isinstance(item, DataError):
                raise item
            yield item
    except (Exception, _Interrupt) as raised:
        if not loader.num_workers:
            raise
        error = raised.args[0] if isinstance(raised, _Interrupt) else raised
        # We may notice a closed pipe before the exit of its worker.
        exit_reason = _exit_reason(workers, timeout_s=1.0 if isinstance(error, (EOFError, ConnectionError)) else 0.0)
        _kill(workers)
        # The iterator's own shutdown would wait forever for a lock that a stopped or killed worker held.
        if items is not None:
            items._shutdown = True
            if items._worker_pids_set:  # else the next iterator with this id would own them
                _utils.signal_handling._remove_worker_pids(id(items))
        raise _to_data_error(error, exit_reason, loader.timeout, check_files) from error


def ignore_signals_in_worker(_worker: int) -> None:
    """Leave signals and failure reports to the parent process (a `worker_init_fn`).

    Schedulers send the signals that end a run, or make it save, to all processes, but saving still needs the data. And
    if the parent ends the run while a worker sends it a batch, the connection breaks, and the traceback of the
    worker's sending thread would be noise.
    """
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    excepthook = sys.excepthook

    def filter_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_sending = trace is not None and trace.tb_frame.f_code.co_filename == resource_sharer.__file__
        if not (is_sending and issubclass(kind, (ConnectionError, EOFError))):
            excepthook(kind, error, trace)

    sys.excepthook = filter_traceback


def _kill(workers: list[BaseProcess]) -> None:
    """Kill workers by SIGKILL, the only signal that stopped processes react to."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_KILL_TIMEOUT_S)


@contextmanager
def _watch(workers: list[BaseProcess], timeout_s: float) -> Iterator[None]:
    """Raise in the body, where the main thread waits, as soon as a worker dies or the timeout expires.

    Torch's own checks do not suffice. Its handler for a dead worker raises wherever the main thread happens to be. Its
    timeout does not apply while it receives a batch from a worker that announced the batch and was then stopped.
    """

    def check(*_: Any) -> None:
        if _exit_reason(workers) is not None:
            raise _Interrupt(ChildProcessError())

    def expire(*_: Any) -> None:
        raise _Interrupt(TimeoutError())

    if not workers or threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield
        return
    signal.signal(signal.SIGCHLD, check)
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        # A worker that died before the handler was set sends no second signal.
        check()
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _exit_reason(workers: list[BaseProcess], timeout_s: float = 0.0) -> str | None:
    """Return the signal or exit code of the first worker that failed, waiting up to `timeout_s` for one to exit."""
    deadline = time.monotonic() + timeout_s
    while True:
        for worker in workers:
            if code := worker.exitcode:
                return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def _to_data_error(
    error: Exception, exit_reason: str | None, timeout_s: float, check_files: Callable[[], None]
) -> DataError:
    if exit_reason is not None:
        # A truncated file kills the worker that has mapped it (SIGBUS), so we name the file rather than the signal.
        try:
            check_files()
        except DataError as damage:
            return damage
        return DataError(f"a data loader worker died ({exit_reason}); try data.num_workers=0")
    if isinstance(error, DataError):
        return error
    if isinstance(error, TimeoutError) or "DataLoader timed out" in str(error):
        shared = shutil.disk_usage(_SHARED).total >> 20 if _SHARED.is_dir() else _ENOUGH_SHARED_MIB
        small = f"{_SHARED} ({shared} MiB for their batches) and " if shared < _ENOUGH_SHARED_MIB else ""
        return DataError(
            f"the data loader workers returned nothing for {timeout_s:g} s (data.worker_timeout_s); check {small}the "
            "file system of data.path, try data.num_workers=0 or a larger data.worker_timeout_s"
        )
    # Torch packs a worker's traceback into the message, and the last line is the cause.
    cause = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return DataError(f"a data loader worker failed: {cause}")
