"""The processes of one preparation: they find each other, share work out and wait for each other through files.

All that they share is the folder of the unfinished store, so there may be several machines, and launchers of any kind.
Rank 0 leads: it holds the lock on the folder, waits for the others to come, and opens a **session**, a folder of its
own, in which a piece of work belongs to whoever makes its file first. Every process renews a **beat** file. The leader
watches the beats of all, the others that of the leader; a process whose beat stands still for `timeout_s`, or that is
gone from this machine, is lost. Whoever fails or finds another lost says so in the session, and all end.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from mmldlm.distributed.exit_files import ProcessInfo
from mmldlm.errors import ExitCode, PeerLostError, UsageError, error_from_exit_code, exit_code_and_cause
from mmldlm.utils.files import write_atomically

INTERVAL_S = 0.5  # between two beats, and two looks at those of others
_POLL_S = 0.05
_LEAVING_S = 10.0  # for the others to see that the leader has failed, before it clears away
_CREW, _SESSION, _FAILED = "crew", "session.json", "failed.json"


class Place(NamedTuple):
    """Of this process among those that were launched together; `launch` tells them from others."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launch: str = ""


def place_of(environment: Mapping[str, str]) -> Place:
    """As accelerate launch, torchrun and the like describe it; UsageError where it makes no sense."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if environment.get("WORLD_SIZE", "1") == "1":
        return Place()
    for name in names:
        if not environment.get(name, "").isdigit():
            raise UsageError(f"launcher: {name}: expected a whole number, found {environment.get(name)!r}")
    rank, world_size, local_rank = (int(environment[name]) for name in names)
    if rank >= world_size:
        raise UsageError(f"launcher: RANK: expected less than WORLD_SIZE {world_size}, found {rank}")
    launch = ":".join(environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    return Place(rank, world_size, local_rank, launch)


class _Peer:
    """Another process, and when its beat was last seen to change."""

    def __init__(self, rank: int, beat: Path, process: ProcessInfo):
        self.rank, self.beat, self.process = rank, beat, process
        self._seen, self._since = "", time.monotonic()

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid} on {self.process.host})"

    @property
    def has_left(self) -> bool:
        return self.process.state() == "gone" or not self.beat.exists()

    def silence(self) -> float:
        """Seconds; infinite where the process is known to be gone."""
        if self.process.state() == "gone":
            return float("inf")
        found = _read(self.beat)
        if found != self._seen:
            self._seen, self._since = found, time.monotonic()
        return time.monotonic() - self._since


class Crew:
    """Use as a context manager: meets the others on entry, tells them of an error on exit.

    `folder` is that of the unfinished store; `options` is what all processes have to agree on. A single process
    writes no files. PeerLostError, or the other's own error, where another process fails.
    """

    def __init__(self, folder: Path, place: Place, timeout_s: float, options: str = ""):
        self.rank, self.world_size = place.rank, place.world_size
        self.folder, self.timeout_s = folder, timeout_s
        self._own = {"rank": place.rank, "launch": place.launch, "options": options, **asdict(ProcessInfo.current())}
        self._id = uuid.uuid4().hex
        self._beat = folder / _CREW / f"{self._id}.beat"
        self._left = threading.Event()
        self._beating = threading.Thread(target=self._keep_beating, name="beat", daemon=True)
        self._peers: list[_Peer] = []
        self._next_look = 0.0
        self.session = folder / f"session-{self._id}"

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Crew:
        if self.world_size > 1:
            self._beat.parent.mkdir(parents=True, exist_ok=True)
            self._beat.write_text("0", encoding="ascii")
            self._beating.start()
            try:
                write_atomically(self._beat.with_suffix(".json"), json.dumps(self._own))
                (self._gather if self.leads else self._join)()
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.world_size == 1:
            return
        if error is not None:
            self._tell(*exit_code_and_cause(error))
        if self.leads:  # which may clear the folder away
            deadline = time.monotonic() + (self.timeout_s if error is None else min(self.timeout_s, _LEAVING_S))
            while not all(peer.has_left for peer in self._peers) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        self._leave()

    def take(self, work: str) -> bool:
        """Whether `work` is this process's to do: it is the first of the session to ask for it."""
        self.check()
        if self.world_size == 1:
            return True
        try:
            (self.session / work).open("x").close()
        except FileExistsError:
            return False
        except FileNotFoundError:
            self._lost_session()
        return True

    def put(self, name: str, text: str) -> None:
        """Leave something in the session for the others."""
        if self.world_size > 1:
            write_atomically(self.session / name, text)

    def get(self, name: str) -> str:
        """Wait for what another process puts into the session."""
        self.wait(lambda: (self.session / name).exists())
        return (self.session / name).read_text(encoding="utf-8")

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until another process has done what is waited for."""
        while not condition():
            self.check()
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Look for failures and lost processes, where the last look is some time ago: cheap enough for each batch."""
        if self.world_size == 1 or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + INTERVAL_S
        if told := _read(self.session / _FAILED):
            self._raise(json.loads(told))
        for peer in self._peers:
            if (silence := peer.silence()) > self.timeout_s:
                if told := _read(self.session / _FAILED):  # its own word, left just before it went
                    self._raise(json.loads(told))
                how = "is gone" if silence == float("inf") else f"gave no sign of life for {self.timeout_s:g} s"
                raise PeerLostError(f"{peer} {how}; start the same command again to go on")
        if not self.session.exists():
            self._lost_session()

    def _raise(self, told: dict[str, Any]) -> None:
        text = f"rank {told['rank']} failed: {told['cause']}"
        raise (
            PeerLostError(text)
            if told["code"] in (1, ExitCode.INTERRUPTED)
            else error_from_exit_code(told["code"], text)
        )

    def _lost_session(self) -> None:
        raise PeerLostError(f"{self.session}: no longer there: the leading process has ended")

    def _tell(self, code: int, cause: str) -> None:
        """The first word of a failure counts."""
        with suppress(OSError):
            temporary = self.session / f"{_FAILED}.{self.rank}"
            temporary.write_text(json.dumps({"rank": self.rank, "code": code, "cause": cause}), encoding="utf-8")
            if not (self.session / _FAILED).exists():
                temporary.replace(self.session / _FAILED)

    # --- coming and leaving --------------------------------------------------------------------

    def _gather(self) -> None:
        """Wait for all others of this launch, and open the session."""
        for old in self.folder.glob("session-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.session.mkdir()
        candidates: dict[str, tuple[_Peer, str, str]] = {}
        alive: dict[int, tuple[str, _Peer]] = {}
        deadline = time.monotonic() + self.timeout_s
        while missing := [rank for rank in range(1, self.world_size) if rank not in alive]:
            for path in (self.folder / _CREW).glob("*.json"):
                if path.stem in candidates or not (found := _described(path)):
                    continue
                if found["launch"] == self._own["launch"] and 0 < found["rank"] < self.world_size:
                    process = ProcessInfo(**{key: found[key] for key in ProcessInfo.__dataclass_fields__})
                    peer = _Peer(found["rank"], path.with_suffix(".beat"), process)
                    candidates[path.stem] = peer, _read(peer.beat), found["options"]
            for name, (peer, first, options) in candidates.items():
                # Files of a launch that was killed lie here as well, and beat no more.
                if peer.silence() < float("inf") and _read(peer.beat) not in ("", first):
                    alive.setdefault(peer.rank, (name, peer))
                    if options != self._own["options"]:
                        raise UsageError(f"{peer} was started with other options than rank 0")
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, missing))
                raise PeerLostError(f"{self.folder}: rank {ranks} did not come within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        self._peers = [peer for _, peer in alive.values()]
        names = {rank: name for rank, (name, _) in alive.items()} | {0: self._id}
        for path in (self.folder / _CREW).iterdir():
            if path.stem not in names.values():
                path.unlink(missing_ok=True)
        members = [names[rank] for rank in range(self.world_size)]
        session = {"members": members, "leader": asdict(ProcessInfo.current())}
        write_atomically(self.folder / _SESSION, json.dumps(session))

    def _join(self) -> None:
        """Wait for the leader's session that names this process."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            found = _described(self.folder / _SESSION)
            if found and self._id in found["members"]:
                break
            if time.monotonic() > deadline:
                raise PeerLostError(f"{self.folder}: rank 0 opened no session within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        leader = found["members"][0]
        self.session = self.folder / f"session-{leader}"
        self._peers = [_Peer(0, self._beat.with_name(f"{leader}.beat"), ProcessInfo(**found["leader"]))]

    def _keep_beating(self) -> None:
        count = 0
        while not self._left.wait(INTERVAL_S):
            count += 1
            with suppress(OSError):  # the leader may have cleared the folder away
                self._beat.write_text(str(count), encoding="ascii")

    def _leave(self) -> None:
        self._left.set()
        self._beating.join()
        for path in (self._beat.with_suffix(".json"), self._beat):
            path.unlink(missing_ok=True)


def _read(path: Path) -> str:
    """Nothing where it is not there."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _described(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
