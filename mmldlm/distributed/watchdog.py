"""A watchdog in every rank, which ends the run on all ranks if one dies, hangs or raises.

Each rank publishes a heartbeat in the store of the process group. If a collective takes long or fails, the waiting rank
reads the heartbeats of all ranks, finds out which rank is at fault (`hang_diagnosis.py`), and publishes that as the
failure of the run. All ranks read this one key in every interval, and exit.

A collective of gloo takes long if the main thread does not return from it. NCCL's calls return at once, so a collective
of NCCL takes long if its process group completes nothing (`flight_recorder.py`), whatever the main thread does
meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from mmldlm.distributed.exit_files import ProcessInfo, dump_stacks, kill_processes, write_exit
from mmldlm.distributed.flight_recorder import NCCL_PREFIX, NCCLProgress, pending_collectives, write_records
from mmldlm.distributed.hang_diagnosis import (
    Failure,
    Heartbeat,
    PeerHeartbeat,
    PendingCollective,
    diagnose,
    is_conclusive,
)
from mmldlm.distributed.notify import Notifier
from mmldlm.errors import ExitCode, PeerLostError
from mmldlm.utils.short_repr import truncate

GRACE_PERIOD_S = 1.0  # for the main thread to raise a failure itself, before its watchdog ends the process
CLEANUP_TIMEOUT_S = 10.0  # for the main thread to clean up after a failure
REPORT_TIMEOUT_S = 8.0  # for the watchdog to diagnose the failure and write the exit files
_MAX_ERROR_CHARACTERS = 300  # longest error of a library in a message
_FAILED, _HOST = "failed", "beat/0"  # keys of the failure and of rank 0's heartbeat. Rank 0 usually hosts the store

# Messages of gloo when a peer is gone. Errors of NCCL and of the store have their own types.
_CONNECTION_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
)


class _Phase(NamedTuple):
    collective: str  # "" outside of any collective
    since: float


class Watchdog:
    """The watchdog of one rank. A call from the main thread costs no more than an assignment.

    Two threads run next to the main thread. One talks to the store and may block in it forever. The other ends the
    process if the main thread cannot.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float, interval_s: float = 0.5):
        """Connect to the store. `start` starts the threads, which publish a heartbeat in every interval."""
        self.rank, self.world_size, self.timeout_s, self.interval_s = rank, world_size, timeout_s, interval_s
        self.folder: Path | None = None  # of the exit files, once it exists
        self.notifier: Notifier | None = None
        self._address = _address(store)
        # We need a separate connection, because a thread that waits in a store call holds its connection's lock.
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._window = max(3 * interval_s, 1.5)  # a rank is silent if its counter does not change for this long
        self._long_s = max(timeout_s / 8, 1.0)  # after a wait this long, we read the heartbeats of all ranks
        self.step = 0  # named by heartbeats and messages
        self._heartbeat = Heartbeat(rank, ProcessInfo.current())
        self._phase = _Phase("", time.monotonic())
        self._nccl_progress = NCCLProgress()
        self._nccl_phase: _Phase | None = None  # the collective of NCCL that takes long, if any
        self._peers: dict[int, PeerHeartbeat] = {}
        self._failure: Failure | None = None  # the first of the run
        self._failed_at = 0.0
        self._outgoing: Failure | None = None
        self._exiting_thread: int | None = None  # the thread that ends this process
        self._lock = threading.Lock()
        self._store_lost = self._poll_all_ranks = False
        self._requested_at = self._answered_at = self._all_ranks_polled_at = time.monotonic()
        self._closed, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True)
            for target in (self._publish_heartbeats, self._monitor)
        ]

    # --- for the main thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish the first heartbeat and start to watch the run."""
        # Create them empty unless another rank was first, because `multi_get` would wait for a missing key.
        for key in (_FAILED, _HOST):
            self._store.compare_set(key, "", "")
        self._sync_with_store()
        for thread in self._threads:
            thread.start()

    @contextmanager
    def in_collective(self, collective: str) -> Iterator[None]:
        """Mark the body as waiting for peers, and raise `PeerLostError` if it loses one."""
        outer = self._phase
        self._phase = _Phase(collective, time.monotonic())
        try:
            yield
        except Exception as error:
            lost = self.diagnose(error)  # before the phase ends, so that peers still see it
            if lost is None or lost is error:
                raise
            raise lost from error
        finally:
            # The outer phase starts over, and so does its timeout.
            self._phase = _Phase(outer.collective, time.monotonic())

    def diagnose(self, error: Exception) -> PeerLostError | None:
        """Return the loss of a peer that caused `error`, naming the peer, or None if `error` has another cause."""
        if isinstance(error, PeerLostError):
            return error
        broken = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _CONNECTION_ERRORS)
        if self._closed.is_set() or not (broken or isinstance(error, dist.DistError)):
            return None
        if not self._claim_exit(ExitCode.PEER_LOST, f"lost a peer: {error}"):
            return None
        return PeerLostError(self._report(self._investigate(error), error))

    def fail(self, code: int, cause: str) -> None:
        """Write the exit record of this rank, which ends with `code`, and publish the cause to all other ranks."""
        if self._claim_exit(code, cause):
            if self.folder is not None:
                write_exit(self.folder, self.rank, self.step, code, cause)
            text = f"rank {self.rank} ended with exit code {int(code)} at step {self.step}: {cause}"
            self._publish(Failure(text))

    def close(self) -> None:
        """Tell the other ranks that this one is done, after success or failure, and stop the threads."""
        timeout = 2 * self.interval_s + 0.5 if self._store_responds() else 0.1
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout)

    # --- the thread that talks to the store, and may block in it forever ----------------------------------

    def _publish_heartbeats(self) -> None:
        try:
            while not self._closed.is_set() and not self._store_closed():
                self._sync_with_store()
                self._wake.wait(self.interval_s)
                self._wake.clear()
            self._sync_with_store(done=self._closed.is_set())
            self._mark_done()
        except RuntimeError:  # from the store
            self._store_lost = True

    def _sync_with_store(self, done: bool = False) -> None:
        """Publish our heartbeat and failure, and read the failure of the run and heartbeats of peers."""
        store, phase, now = self._store, self._longest_wait(), time.monotonic()
        self._heartbeat = replace(
            self._heartbeat,
            count=self._heartbeat.count + 1,
            step=self.step,
            phase=phase.collective,
            for_s=round(now - phase.since, 1),
            done=done,
        )
        store.set(f"beat/{self.rank}", json.dumps(asdict(self._heartbeat)))
        if self._outgoing is not None:
            # Only the first failure of the run counts. A later one does not change the key.
            store.compare_set(_FAILED, "", json.dumps(asdict(self._outgoing)))
            self._outgoing = None
        failed, host = store.multi_get([_FAILED, _HOST])
        if failed and self._failure is None:
            self._failed_at, self._failure = time.monotonic(), Failure.parse(failed)
        texts: Sequence[bytes] = [host] if host else []
        # More ranks make reading all heartbeats more expensive, so a long wait repeats it only now and then.
        waited = now - max(phase.since, self._all_ranks_polled_at)
        long_wait = phase.collective and waited > self._long_s
        if not failed and (long_wait or self._poll_all_ranks):
            texts, self._all_ranks_polled_at = self._read_heartbeats(), now
        for heartbeat in map(Heartbeat.parse, texts):
            if heartbeat.rank != self.rank:
                old = self._peers.get(heartbeat.rank)
                # If the count is unchanged, keep the time of its first reading, since when the peer may be silent.
                first_read = old.first_read if old is not None and old.heartbeat.count == heartbeat.count else now
                self._peers[heartbeat.rank] = PeerHeartbeat(heartbeat, first_read, now)
        # `_requested_at` is before the reads, so that a waiting thread can tell whether a reading is fresh.
        self._requested_at, self._answered_at = now, time.monotonic()

    def _read_heartbeats(self) -> Sequence[bytes]:
        keys = [f"beat/{rank}" for rank in range(self.world_size)]
        if not self._store.check(keys):  # a read would wait for a missing key
            keys = [key for key in keys if self._store.check([key])]
        return self._store.multi_get(keys)

    def _store_closed(self) -> bool:
        """Return whether rank 0 is done and has closed the store that it hosted."""
        return 0 in self._peers and self._peers[0].heartbeat.done and not _launcher_hosts_store()

    def _mark_done(self) -> None:
        self._store.set(f"done/{self.rank}", "1")
        keys = [f"done/{self.rank}"]  # make sure that it has arrived
        if self.rank == 0 and not _launcher_hosts_store():
            # A rank that misses our last heartbeat would take the end of the store for a failure.
            lost = {rank for rank, peer in self._peers.items() if peer.status(self._window)}
            keys = [f"done/{rank}" for rank in range(self.world_size) if rank not in lost]
        deadline = time.monotonic() + 2 * self.interval_s
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.02)

    # --- the thread that ends the process where the main thread cannot ------------------------------------

    def _monitor(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.interval_s / 2):
            now = time.monotonic()
            self._watch_nccl(now)
            was_stopped, before = now - before > self.interval_s / 2 + 1, now
            # A process that was stopped (SIGSTOP) must first read the store.
            if not was_stopped and self._exiting_thread is None and self._must_exit(now):
                self._end_process()

    def _watch_nccl(self, now: float) -> None:
        """Update which collective of NCCL takes long."""
        stall = self._nccl_progress.stall(now)
        if stall is None or now - stall.since <= self._long_s:
            self._nccl_phase = None
        elif self._nccl_phase is None or self._nccl_phase.since != stall.since:
            # Look up its name only once, because that reads the whole record.
            unknown = f"{NCCL_PREFIX}collective after number {stall.completed}"
            name = next((text for text in pending_collectives() if text.startswith(NCCL_PREFIX)), unknown)
            self._nccl_phase = _Phase(name, stall.since)

    def _longest_wait(self) -> _Phase:
        """Return the collective that this rank has waited in longest, in the main thread or on the GPU."""
        phase, nccl = self._phase, self._nccl_phase
        return phase if nccl is None or (phase.collective and phase.since < nccl.since) else nccl

    def _must_exit(self, now: float) -> bool:
        # Exit if the main thread has not raised a published failure, if a collective takes too long, or if the store
        # does not respond, unless rank 0 closed it at its end.
        phase = self._longest_wait()
        return (
            (self._failure is not None and now - self._failed_at > GRACE_PERIOD_S)
            or (bool(phase.collective) and now - phase.since > self.timeout_s + GRACE_PERIOD_S)
            or (now - self._answered_at > self.timeout_s and not self._store_closed())
        )

    def _end_process(self) -> None:
        cause = f"lost a peer in {self._longest_wait().collective or 'no collective'}"
        if self._claim_exit(ExitCode.PEER_LOST, cause, REPORT_TIMEOUT_S):
            cause = self._report(self._investigate())
            self.close()
            if self.notifier is not None:
                self.notifier.wait()
            _exit(ExitCode.PEER_LOST, cause)

    # --- for both the main thread and the monitor, when the run has to end --------------------------------

    def _claim_exit(self, code: int, cause: str, timeout_s: float = CLEANUP_TIMEOUT_S) -> bool:
        """Return whether the calling thread is the one that ends this process. It then has `timeout_s` to do so."""
        with self._lock:
            if self._exiting_thread is None:
                self._exiting_thread = threading.get_ident()
                # Ends the process even if this thread gets stuck.
                backstop = threading.Timer(timeout_s, _exit, [code, cause])
                backstop.daemon = True
                backstop.start()
                return True
        if self._exiting_thread != threading.get_ident():
            time.sleep(CLEANUP_TIMEOUT_S)  # the other thread ends this process
        # This thread claimed it before, for example in `diagnose` before `fail`, and has reported the cause.
        return False

    def _investigate(self, error: Exception | None = None) -> Failure:
        """Return the failure of the run: the published one, or a diagnosis from the heartbeats."""
        phase = self._longest_wait()
        seconds = time.monotonic() - phase.since
        # For NCCL, the collective's name says everything.
        details = [] if phase is self._nccl_phase else pending_collectives(or_latest=error is not None)
        detail, is_long = "".join(details[:1]), seconds > self.timeout_s / 2
        text = truncate(" ".join(str(error or "").partition("\n")[0].split()), _MAX_ERROR_CHARACTERS)
        wait = PendingCollective(self.rank, self.step, phase.collective, detail, seconds, is_long, text)
        time.sleep(min(0.01 * self.rank, 1.0))  # staggered, so that only the first few of a thousand ranks investigate
        # From now on, the store's thread reads all heartbeats, immediately and in every interval.
        self._poll_all_ranks = True
        started_at = time.monotonic()
        self._wake.set()
        counts: dict[int, int] = {}
        while self._failure is None and time.monotonic() < started_at + self._window + 1:
            peers, is_fresh = dict(self._peers), self._requested_at > started_at
            # The first reading since we started. Ranks that count on from here respond.
            if is_fresh and not counts:
                counts = {rank: peer.heartbeat.count for rank, peer in peers.items()}
            # Without the store, we still see which processes of this machine are gone or stopped.
            if (is_fresh or not self._store_responds()) and is_conclusive(peers, counts, self._window):
                break
            time.sleep(0.05)
        # If no reading has begun since we started, the store's thread still waits for an answer, or has ended.
        store_unreachable = "" if self._requested_at > started_at else f"the store at {self._address}"
        return self._failure or diagnose(wait, self.world_size, dict(self._peers), self._window, store_unreachable)

    def _publish(self, failure: Failure) -> Failure:
        """Publish `failure` and return the first failure of the run, which may come from another rank."""
        self._outgoing = failure
        self._wake.set()
        # The store's thread publishes it and reads back the first failure of the run.
        deadline = time.monotonic() + 1
        while self._failure is None and self._store_responds() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._failure or failure

    def _store_responds(self) -> bool:
        dead = self._store_lost or self._closed.is_set()
        return not dead and time.monotonic() - self._answered_at < 2 * self.interval_s + 0.5

    def _report(self, failure: Failure, error: Exception | None = None) -> str:
        """Publish the failure, write the exit files, kill processes that cannot end, and return this rank's cause."""
        failure = self._failure or self._publish(failure)
        cause = failure.cause
        if self.notifier is not None:
            self.notifier.start(self.step, ExitCode.PEER_LOST, cause)
        if self.folder is not None:
            write_exit(self.folder, self.rank, self.step, ExitCode.PEER_LOST, cause)
            location = f"step {self.step}, {self._longest_wait().collective or 'outside of any collective'}"
            dump_stacks(self.folder, self.rank, f"{location}: {cause}", error)
            write_records(self.folder, self.rank)
        # Another rank may have diagnosed the failure while this process was silent.
        kill_processes(process for process in failure.silent if process != self._heartbeat.process)
        return cause


def _exit(code: int, cause: str) -> None:
    """End the process without its main thread."""
    hard = threading.Timer(1.0, os._exit, [code])  # because a full pipe may block the print
    hard.daemon = True
    hard.start()
    # `os._exit` skips the cleanup that ends multiprocessing's processes, such as loader workers.
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
