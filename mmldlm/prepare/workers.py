"""Tasks of a stage on this machine: in this process, or in a pool of worker processes.

A worker has nothing to lose: a finished task is a renamed folder, and an unfinished task is done again. So workers
simply end when the main process leaves the pool or dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from mmldlm.errors import PeerLostError
from mmldlm.prepare.job import Job, Stage, run_task
from mmldlm.prepare.report import StageProgress
from mmldlm.utils.process import STOP_SIGNALS

_POLL_S = 0.2
RunTasks: TypeAlias = Callable[[Job, Stage, Sequence[int], StageProgress], None]


def run_in_process(job: Job, stage: Stage, chunks: Sequence[int], progress: StageProgress) -> None:
    """Run tasks of a stage one after the other in this process."""
    for chunk in chunks:
        part = f", chunk {chunk + 1} of {len(job.chunks)}" if stage.per_chunk and len(job.chunks) > 1 else ""
        progress.phase(stage.title + part)
        run_task(job, stage, chunk, progress)


@contextmanager
def worker_pool(job: Job) -> Iterator[RunTasks]:
    """Yield a function that runs tasks of a stage in `--processes` processes, but in no more than there are chunks.

    It is a `PeerLostError` if a worker died.
    """
    num_workers = min(job.config.processes, len(job.chunks))
    if num_workers < 2:
        yield run_in_process
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with _blocked(signal.SIGHUP):  # the tracker does not ignore it by itself
        resource_tracker.ensure_running()  # else it would start below, and end the blocking of signals
    next_worker = context.Value("i", 0)
    alive, closed_at_end = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, (job, next_worker, alive))

    def run(job: Job, stage: Stage, chunks: Sequence[int], progress: StageProgress) -> None:
        progress.phase(stage.title)
        with _blocked(*STOP_SIGNALS):  # also in the workers, which inherit it
            pending = {executor.submit(_run_in_worker, stage, chunk) for chunk in chunks}
        while pending:
            finished, pending = wait(pending, _POLL_S, FIRST_EXCEPTION)
            for future in finished:
                future.result()  # raises the error of its task
            progress.advance(len(job.chunks) - len(pending), "chunks", len(job.chunks))

    try:
        yield run
    except BrokenProcessPool:
        raise PeerLostError(
            "a worker process was killed, perhaps because memory ran out; start the same command again to continue"
        ) from None
    finally:
        # This ends workers at once, also within a task. If a worker is killed while it holds the lock of the queue, the
        # others wait for the lock, and a shutdown alone would wait for them forever.
        closed_at_end.close()
        executor.shutdown(cancel_futures=True)


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Hold signals back until the end of the block. Processes that start in it never receive them."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


_job: Job  # of a worker
_progress = StageProgress(enabled=False)


def _start_worker(job: Job, next_worker: Any, alive: Connection) -> None:
    global _job
    _job = job
    tqdm.set_lock(threading.RLock())  # its default takes a semaphore, which a killed worker leaks
    # Reading the pipe ends when the main process closes it or dies, even by SIGKILL.
    threading.Thread(target=_exit_with_main_process, args=(alive,), daemon=True).start()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers share the cores
    torch.set_num_threads(1)  # sums depend on the number of threads
    if torch.cuda.is_available():
        with next_worker.get_lock():
            index, next_worker.value = next_worker.value, next_worker.value + 1
        torch.cuda.set_device(index % torch.cuda.device_count())


def _exit_with_main_process(alive: Connection) -> None:
    with suppress(EOFError, OSError):
        alive.recv_bytes()  # nothing is ever sent
    os._exit(1)


def _run_in_worker(stage: Stage, chunk: int) -> None:
    run_task(_job, stage, chunk, _progress)
