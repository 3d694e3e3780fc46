"""Advisory lock on a run folder, released by the kernel when its process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm.errors import RunInUseError, StorageError

FILE = "run.lock"
_MAX_BYTES = 4096

log = logging.getLogger(__name__)

# A forked child (such as a data loader worker) inherits the lock and would keep holding it after this process has died.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """Exclusive lock on `run_dir`, held from `__enter__` to `__exit__` or until the process dies.

    The file `run.lock` names the holder and is never deleted. Only the kernel's lock on it counts, so the file of a
    killed run leaves no lock.

    Attributes:
        previous: `host`, `pid` and `started` of the last holder if it was killed, else None.
    """

    def __init__(self, run_dir: Path | str):
        self.path = Path(run_dir) / FILE
        self.previous: dict[str, Any] | None = None
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """Acquire the lock without waiting.

        A `RunInUseError` names the process that holds the folder. A file that cannot be opened, or a file system
        without locks, is a `StorageError`.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The file is truncated and written, so a symbolic link must not lead to another file.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageError(f"cannot open {self.path}: {error.strerror}") from error
        try:
            self._acquire(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _held.add(descriptor)
        self._descriptor = descriptor
        return self

    def __exit__(self, *error: object) -> None:
        # In a forked child the descriptor is closed already, and its number may have been reused for another file.
        if self._descriptor is not None and self._descriptor in _held:
            os.ftruncate(self._descriptor, 0)  # an empty file marks a clean exit
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a child just forked may have it open
            os.close(self._descriptor)
            _held.discard(self._descriptor)
        self._descriptor = None

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise StorageError(f"cannot lock {self.path}: {error.strerror}") from error
            raise RunInUseError(f"{self.path.parent} is in use by {_describe(_holder(descriptor))}") from error
        self.previous = _holder(descriptor)
        if self.previous is not None:
            log.warning("%s: its last run, %s, exited without cleanup", self.path.parent, _describe(self.previous))
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)


def _holder(descriptor: int) -> dict[str, Any] | None:
    """Return the content of the lock file; None if it is empty or not yet written."""
    try:
        holder = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except (ValueError, RecursionError):
        return None
    return holder if isinstance(holder, dict) else None


def _describe(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "another process"
    return f"process {holder.get('pid')} on host {holder.get('host')}, started {holder.get('started')}"
