"""A watchdog beside each rank, so that a rank that dies, hangs or raises ends the run on all ranks.

Each rank publishes a heartbeat in the store of the process group. Nobody reads those of all others until a collective
takes long or fails: then whoever waits finds out which rank is at fault (`verdict.py`), and publishes that as the
failure of the run. All read that one key every interval, and leave.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from mmldlm.distributed.exit_files import (
    Process,
    dump_flight_recorder,
    dump_stacks,
    kill_processes,
    pending_collective,
    write_exit,
)
from mmldlm.distributed.hang_diagnosis import Failure, Heartbeat, PendingCollective, Seen, diagnose, is_conclusive
from mmldlm.errors import ExitCode, PeerLostError

GRACE_S = 1.0  # for a main thread to meet a failure by itself, before its watchdog ends the process
LEAVING_S = 10.0  # for a main thread that failed to clean up
LAST_WORDS_S = 8.0  # for a watchdog to find out and write what it can
_FAILED, _HOST = "failed", "beat/0"

# What gloo says when a peer is gone; errors of NCCL and of the store have types of their own.
_BROKEN = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
)


class _Phase(NamedTuple):
    collective: str  # "" outside of any
    since: float


class Watchdog:
    """One per rank. What the main thread tells it costs no more than an assignment."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float, interval_s: float = 0.5):
        self.rank, self.world_size, self.timeout_s, self.interval_s = rank, world_size, timeout_s, interval_s
        self.folder: Path | None = None
        self._address = _address(store)
        # A connection of its own: a thread that waits in a store call holds the lock of its connection.
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._window = max(3 * interval_s, 1.5)  # a counter that stands still for so long is of a silent rank
        self.step = 0
        self._beat = Heartbeat(rank, Process.own())
        self._phase = _Phase("", time.monotonic())
        self._peers: dict[int, Seen] = {}
        self._failure: Failure | None = None  # the first of the run
        self._failed_at = 0.0
        self._outgoing: Failure | None = None
        self._leaving: int | None = None  # the thread that ends this process
        self._lock = threading.Lock()
        self._store_lost = self._poll_all_ranks = False
        self._asked = self._answered = self._census_at = time.monotonic()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._keep_beating, self._judge)
        ]

    # --- for the main thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish the first beat; from here on the run is watched."""
        for key in (_FAILED, _HOST):
            self._store.compare_set(key, "", "")
        self._exchange()
        for thread in self._threads:
            thread.start()

    def watch(self, folder: Path) -> None:
        """From here on last words go to `folder`."""
        self.folder = folder

    def at(self, step: int) -> None:
        self.step = step

    @contextmanager
    def in_collective(self, collective: str) -> Iterator[None]:
        """In the body the main thread waits for its peers; their loss is raised as `PeerLostError`."""
        outer = self._phase
        self._phase = _Phase(collective, time.monotonic())
        try:
            yield
        except Exception as error:
            lost = self.diagnose(error)  # still in this phase, which is where the peers are to see us
            if lost is None or lost is error:
                raise
            raise lost from error
        finally:
            self._phase = _Phase(outer.collective, time.monotonic())

    def diagnose(self, error: Exception) -> PeerLostError | None:
        """The loss of a peer that stands behind `error`, and who it was; None if `error` is of our own making."""
        if isinstance(error, PeerLostError):
            return error
        broken = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _BROKEN)
        if self._closed.is_set() or not (broken or isinstance(error, dist.DistError)):
            return None
        if not self._claim(ExitCode.PEER_LOST, f"lost a peer: {error}"):
            return None
        return PeerLostError(self._report(self._investigate(failed=True), error))

    def fail(self, code: int, cause: str) -> None:
        """This rank ends with `code`: leave its record, and tell all others why."""
        if self._claim(code, cause):
            if self.folder is not None:
                write_exit(self.folder, self.rank, self.step, code, cause)
            text = f"rank {self.rank} ended with exit code {int(code)} at step {self.step}: {cause}"
            self._publish(Failure(text, self.rank, self.rank))

    def close(self) -> None:
        """The end, good or bad: the others learn that this rank is done."""
        patience = 2 * self.interval_s + 0.5 if self._responds() else 0.1
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(patience)

    # --- the thread that talks to the store, and may block in it for ever ---------------------------------

    def _keep_beating(self) -> None:
        with suppress(RuntimeError):
            while not self._closed.is_set() and not self._store_ended():
                self._exchange()
                self._wake.wait(self.interval_s)
                self._wake.clear()
            self._exchange(done=self._closed.is_set())
            self._say_goodbye()
            return
        self._store_lost = True

    def _exchange(self, done: bool = False) -> None:
        store, phase, now = self._store, self._phase, time.monotonic()
        self._beat = replace(
            self._beat,
            count=self._beat.count + 1,
            step=self.step,
            phase=phase.collective,
            for_s=round(now - phase.since, 1),
            done=done,
        )
        store.set(f"beat/{self.rank}", json.dumps(asdict(self._beat)))
        if self._outgoing is not None:
            store.compare_set(_FAILED, "", json.dumps(asdict(self._outgoing)))
            self._outgoing = None
        failed, host = store.multi_get([_FAILED, _HOST])
        if failed and self._failure is None:
            self._failed_at, self._failure = time.monotonic(), Failure.parse(failed)
        beats: Sequence[bytes] = [host] if host else []
        long_wait = phase.collective and now - max(phase.since, self._census_at) > max(self.timeout_s / 8, 1.0)
        if not failed and (long_wait or self._poll_all_ranks):
            beats, self._census_at = self._read_heartbeats(), now
        for beat in map(Heartbeat.parse, beats):
            if beat.rank != self.rank:
                old = self._peers.get(beat.rank)
                first = old.first if old is not None and old.beat.count == beat.count else now
                self._peers[beat.rank] = Seen(beat, first, now)
        self._asked, self._answered = now, time.monotonic()

    def _read_heartbeats(self) -> Sequence[bytes]:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):  # a read of what is not there would wait for it
            keys = [key for key in keys if self._store.check([key])]
        return self._store.multi_get(keys)

    def _store_ended(self) -> bool:
        """Whether rank 0 is done, and takes the store with it."""
        return 0 in self._peers and self._peers[0].beat.done and not _launcher_hosts_store()

    def _say_goodbye(self) -> None:
        self._store.set(f"done/{self.rank}", "1")
        awaited = [f"done/{self.rank}"]  # so that it has arrived
        if self.rank == 0 and not _launcher_hosts_store():
            # Whoever has not read our last beat would take the end of the store for a failure.
            lost = {rank for rank, seen in self._peers.items() if seen.fault(self._window)}
            awaited = [f"done/{rank}" for rank in range(self.world_size) if rank not in lost]
        patience_ends = time.monotonic() + 2 * self.interval_s
        while not self._store.check(awaited) and time.monotonic() < patience_ends:
            time.sleep(0.02)

    # --- the thread that ends the process where the main thread cannot ------------------------------------

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.interval_s / 2):
            now = time.monotonic()
            was_stopped, before = now - before > self.interval_s / 2 + 1, now
            if not was_stopped and self._leaving is None and self._must_end(now):  # else first hear the news
                self._end()

    def _must_end(self, now: float) -> bool:
        phase = self._phase
        return (
            (self._failure is not None and now - self._failed_at > GRACE_S)
            or (bool(phase.collective) and now - phase.since > self.timeout_s + GRACE_S)
            or (now - self._answered > self.timeout_s and not self._store_ended())
        )

    def _end(self) -> None:
        if self._claim(ExitCode.PEER_LOST, f"lost a peer in {self._phase.collective or 'no collective'}", LAST_WORDS_S):
            cause = self._report(self._investigate(failed=False))
            self.close()
            _exit(ExitCode.PEER_LOST, cause)

    # --- what either of them does when the run is to end --------------------------------------------------

    def _claim(self, code: int, cause: str, seconds: float = LEAVING_S) -> bool:
        """Whether the calling thread is the one that ends this process, which it has `seconds` to do."""
        with self._lock:
            if self._leaving is None:
                self._leaving = threading.get_ident()
                backstop = threading.Timer(seconds, _exit, [code, cause])
                backstop.daemon = True
                backstop.start()
                return True
        if self._leaving != threading.get_ident():
            time.sleep(LEAVING_S)  # the other thread ends this process
        return False

    def _investigate(self, failed: bool) -> Failure:
        """The failure of the run: what a rank has published, or what the beats show; `failed`: a collective raised."""
        phase, seconds = self._phase, time.monotonic() - self._phase.since
        detail = pending_collective(or_latest=failed)
        wait = PendingCollective(self.rank, self.step, phase.collective, detail, seconds, seconds > self.timeout_s / 2)
        time.sleep(min(0.01 * self.rank, 1.0))  # of a thousand ranks the first few find out
        self._poll_all_ranks = True  # what is read from now on is of all ranks
        asked_at = time.monotonic()
        self._wake.set()
        counts: dict[int, int] = {}
        while self._failure is None and time.monotonic() < asked_at + self._window + 1:
            peers, fresh = dict(self._peers), self._asked > asked_at
            if fresh and not counts:
                counts = {rank: seen.beat.count for rank, seen in peers.items()}
            if (fresh or not self._responds()) and is_conclusive(peers, counts, self._window):
                break
            time.sleep(0.05)
        store_unreachable = "" if self._asked > asked_at else f"the store at {self._address}"
        return self._failure or diagnose(wait, self.world_size, dict(self._peers), self._window, store_unreachable)

    def _publish(self, failure: Failure) -> Failure:
        """The failure that the run takes for its first: `failure`, unless another rank was quicker."""
        self._outgoing = failure
        self._wake.set()
        ends = time.monotonic() + 1
        while self._failure is None and self._responds() and time.monotonic() < ends:
            time.sleep(0.01)
        return self._failure or failure

    def _responds(self) -> bool:
        dead = self._store_lost or self._closed.is_set()
        return not dead and time.monotonic() - self._answered < 2 * self.interval_s + 0.5

    def _report(self, failure: Failure, error: Exception | None = None) -> str:
        """Publish, leave last words and end those who cannot; returns the cause for this rank."""
        failure = self._failure or self._publish(failure)
        cause = failure.cause
        if self.folder is not None:
            write_exit(self.folder, self.rank, self.step, ExitCode.PEER_LOST, cause)
            place = f"step {self.step}, {self._phase.collective or 'outside of any collective'}"
            dump_stacks(self.folder, self.rank, f"{place}: {cause}", error)
            dump_flight_recorder(self.folder, self.rank)
        kill_processes(process for process in failure.silent if process != self._beat.process)
        return cause


def _exit(code: int, cause: str) -> None:
    """End the process without the help of its main thread."""
    hard = threading.Timer(1.0, os._exit, [code])  # a full pipe may block the print
    hard.daemon = True
    hard.start()
    for child in multiprocessing.active_children():
        child.kill()
    print(f"mmldlm: error: {cause}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def _launcher_hosts_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _address(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else type(store).__name__
