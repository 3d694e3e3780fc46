"""Loader workers that die, hang or raise end the run with one line at the next batch, and leave no process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from mmldlm.batch import Batch
from mmldlm.data.loader import DataConfig, Loader
from mmldlm.data.store import Split, Store
from mmldlm.data.workers import ignore_signals_in_worker
from mmldlm.errors import DataError
from tests.helpers.batch_sizes import constant_batch_size
from tests.helpers.engine_runs import wait_for_step
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.waiting import TEST_TIMEOUT_S

quick = pytest.mark.quick


def reading(store: Store, **config: object) -> Iterator[tuple[int, list[Batch]]]:
    """100,000 steps through one worker, by default, the first already taken."""
    settings = DataConfig(**{"num_workers": 1, "prefetch_factor": 1, **config})  # type: ignore[arg-type]
    steps = Loader(store, "train", settings, 5, constant_batch_size(64, 8)).steps(0, 100_000)
    next(steps)
    return steps


def iterators() -> list[Any]:
    """The iterators of torch that have workers."""
    return [each for each in gc.get_objects() if type(each).__name__ == "_MultiProcessingDataLoaderIter"]


def one_line(steps: Iterator[tuple[int, list[Batch]]], message: str) -> None:
    open_before = iterators()
    with pytest.raises(DataError, match=message) as error:
        for _ in steps:
            pass
    assert "\n" not in str(error.value)
    assert multiprocessing.active_children() == []
    for each in open_before:  # torch keeps their workers by the id of the iterator, which a later one may have
        if all(worker.exitcode is not None for worker in each._workers):
            with pytest.raises(ValueError, match="Cannot find worker information"):
                _remove_worker_pids(id(each))


@quick
def test_dead_worker_is_reported(store: Store) -> None:
    steps = reading(store)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGKILL)
    time.sleep(0.3)  # in the midst of a step nothing is raised
    one_line(steps, r"^step \d+: a data loader worker died \(SIGKILL\); try data.num_workers=0$")


@quick
def test_dead_worker_ends_the_wait_at_once(store: Store) -> None:
    steps = reading(store, num_workers=2, worker_timeout_s=600)
    first, second = multiprocessing.active_children()
    os.kill(first.pid or 0, signal.SIGSTOP)
    os.kill(second.pid or 0, signal.SIGSTOP)
    with subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -KILL {second.pid}"]):
        one_line(steps, r"a data loader worker died \(SIGKILL\)")


@quick
def test_workers_ignore_scheduler_signals(store: Store) -> None:
    steps = reading(store)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker.pid or 0, number)
    assert [next(steps)[0] for _ in range(20)] == list(range(1, 21)) and worker.is_alive()


@pytest.mark.setting("data.worker_timeout_s")
@pytest.mark.parametrize("ready", [False, True])
def test_a_stopped_worker_ends_the_wait(store: Store, ready: bool) -> None:
    """Batches that the worker has prepared do not help if it cannot send them."""
    steps = reading(store, worker_timeout_s=0.5)
    if ready:
        time.sleep(0.3)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid or 0, signal.SIGSTOP)
    one_line(steps, r"^step \d+: the data loader workers returned nothing for 0.5 s \(data.worker_timeout_s\); .* try ")


@quick
def test_a_lock_that_a_killed_worker_held_is_not_waited_for(store: Store) -> None:
    """Workers look at an event every few moments, and one that is killed meanwhile keeps its lock."""
    steps = reading(store)
    (worker,) = multiprocessing.active_children()
    (items,) = (each for each in iterators() if worker in each._workers)
    lock = items._workers_done_event._cond._lock
    lock.acquire()
    release = threading.Timer(20, lock.release)
    release.start()
    started = time.monotonic()
    os.kill(worker.pid or 0, signal.SIGKILL)
    one_line(steps, r"a data loader worker died \(SIGKILL\)")
    del items, steps
    gc.collect()
    assert time.monotonic() - started < 10
    release.cancel()


@quick
@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_file_is_a_data_error(store: Store, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def gather(*_: object) -> None:
        raise OSError(5, "Input/output error", "train-00000.tokens.npy")

    with monkeypatch.context() as patch:
        patch.setattr(Split, "gather", gather)
        with pytest.raises(DataError, match=r"^step 0: .*cannot be read: .*Input/output error: 'train-0") as error:
            reading(store, num_workers=workers)
    assert "\n" not in str(error.value) and multiprocessing.active_children() == []


@quick
def test_other_worker_errors_name_their_cause(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Split, "gather", gather)
        with pytest.raises(DataError, match=r"^step 0: a data loader worker failed: ZeroDivisionError: planted$"):
            reading(store)
        with pytest.raises(ZeroDivisionError):  # in our own process it is a bug like any other
            reading(store, num_workers=0)
    assert multiprocessing.active_children() == []


@quick
def test_file_truncated_while_read_is_named(copy: Path) -> None:
    steps = reading(Store.open(copy))
    os.truncate(copy / "train-00000.latents.npy", 0)
    one_line(steps, r"train-00000.latents.npy: damaged: 0 bytes, expected")


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_the_command_ends_with_65_and_leaves_nothing_running(
    fault: signal.Signals, tiny_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    settings = ["data.num_workers=2", "data.worker_timeout_s=1", "data.prefetch_factor=1", "train.steps=100000"]
    log = tmp_path / "log"
    (pid,) = forked.start("single", [tiny_config, *settings, "checkpoint.every_steps=0"], 1, log)
    wait_for_step(tmp_path / "run", 2, log, lambda: forked.wait([pid], 0))
    workers = psutil.Process(pid).children(recursive=True)
    assert len(workers) >= 2
    workers[0].send_signal(fault)
    assert forked.wait([pid]) == {pid: 65}, log.read_text()[-3000:]
    errors = log.read_text()
    assert "Traceback" not in errors and errors.count("mmldlm: error: step ") == 1
    assert psutil.wait_procs(workers, timeout=TEST_TIMEOUT_S)[1] == []


@quick
def test_workers_end_with_their_run(store: Store) -> None:
    steps = Loader(store, "train", DataConfig(num_workers=2), 5, constant_batch_size(64, 8)).steps(0, 3)
    assert [step for step, _ in steps] == [0, 1, 2]
    del steps
    assert not any(worker.is_alive() for worker in multiprocessing.active_children())


def test_worker_exits_silently_after_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    """Only the thread of multiprocessing that hands over a batch is silent; other errors have a traceback."""
    process = multiprocessing.get_context("fork").Process(target=_left_alone)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert capfd.readouterr().err.count("Traceback") == 1


def _left_alone() -> None:
    ignore_signals_in_worker(0)
    address = resource_sharer.DupFd(1)._id[0]
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as parent:  # which goes without a word
            parent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            parent.connect(address)
    time.sleep(1)
    try:
        raise ConnectionResetError("of a thread of our own")
    except ConnectionResetError:
        sys.excepthook(*sys.exc_info())
