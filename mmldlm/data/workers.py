"""The worker processes of a DataLoader: what goes wrong in them is a `DataError`, and none of them stays behind."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_sharer
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from mmldlm.errors import DataError

T = TypeVar("T")
_KILLED_S = 2.0  # for killed workers to be gone; one that hangs in the kernel stays until its file system answers


def read(loader: DataLoader[T | DataError], check_files: Callable[[], None]) -> Iterator[T]:
    """What `loader` gives; a `DataError` that it gives is raised.

    Where a worker dies, raises, or gives nothing for the timeout of `loader`: DataError, and all workers are killed.
    `check_files` raises DataError for a file that was cut short, which kills whoever has mapped it.
    """
    workers: list[BaseProcess] = []
    try:
        batches = iter(loader)
        workers = getattr(batches, "_workers", workers)  # torch hands them out nowhere else
        atexit.register(_kill, workers)  # before multiprocessing waits for what it has sent a SIGTERM
        while True:
            with _watching(workers, loader.timeout):
                try:
                    found = next(batches)
                except StopIteration:
                    return
            if isinstance(found, DataError):
                raise found
            yield found
    except Exception as error:
        if not loader.num_workers:
            raise
        # A pipe may be found closed before its worker is found dead.
        death = _death(workers, patience_s=1.0 if isinstance(error, (EOFError, ConnectionError)) else 0.0)
        _kill(workers)
        raise _explained(error, death, loader.timeout, check_files) from error


def leave_it_to_the_parent(_worker: int) -> None:
    """For a worker: its parent answers to signals, and tells of whoever dies.

    Schedulers send to all processes what asks the run to end or to save, which needs its data. And a parent that ends
    the run may do so while it fetches a batch, of which the thread that hands it over would print a traceback.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    show = sys.excepthook

    def show_what_is_ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        handing_over = trace is not None and trace.tb_frame.f_code.co_filename == resource_sharer.__file__
        if not (handing_over and issubclass(kind, (ConnectionError, EOFError))):
            show(kind, error, trace)

    sys.excepthook = show_what_is_ours


def _kill(workers: list[BaseProcess]) -> None:
    """By SIGKILL: a stopped process obeys no other signal."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_KILLED_S)


@contextmanager
def _watching(workers: list[BaseProcess], timeout_s: float) -> Iterator[None]:
    """In the body, where the main thread waits, a dead worker raises at once, and silence when it has lasted too long.

    Torch would raise for a dead worker wherever the main thread happens to be; and its timeout does not hold while it
    fetches a batch that is announced from a worker that has stopped since.
    """

    def check(*_: Any) -> None:
        if _death(workers) is not None:
            raise ChildProcessError

    def late(*_: Any) -> None:
        raise TimeoutError

    if not workers or threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    signal.signal(signal.SIGCHLD, check)
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        check()
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _death(workers: list[BaseProcess], patience_s: float = 0.0) -> str | None:
    """What ended the first worker that did not end in good order, within so many seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        for worker in workers:
            if code := worker.exitcode:
                return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def _explained(error: Exception, death: str | None, timeout_s: float, check_files: Callable[[], None]) -> DataError:
    if death is not None:
        try:
            check_files()
        except DataError as damage:
            return damage
        return DataError(f"a data loader worker died ({death}); try data.num_workers=0")
    if isinstance(error, DataError):
        return error
    if isinstance(error, TimeoutError) or "DataLoader timed out" in str(error):
        return DataError(
            f"the data loader workers gave nothing for {timeout_s:g} s (data.worker_timeout_s); look at the file "
            "system of data.path, try data.num_workers=0 or a larger data.worker_timeout_s"
        )
    # Torch packs a worker's traceback into the message; its last line is the cause.
    cause = (str(error).strip().splitlines() or [""])[-1]
    return DataError(f"a data loader worker failed: {cause or type(error).__name__}")
