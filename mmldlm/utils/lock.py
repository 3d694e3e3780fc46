"""Advisory lock on a run folder. The kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path

from mmldlm.errors import RunInUseError, StorageError

FILE = "run.lock"

# A forked child, such as a loader worker, inherits the lock and would hold it after this process has died.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """Exclusive lock on `run_dir`, held from `__enter__` to `__exit__` or until the process dies.

    The file `run.lock` names the holder and is never deleted. Only the kernel's lock counts, so a run that was killed
    leaves no lock behind.
    """

    def __init__(self, run_dir: Path | str):
        self.path = Path(run_dir) / FILE
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        """Acquire the lock without waiting.

        If another process holds the folder, a `RunInUseError` names it. If the file cannot be opened, or the file
        system has no locks, this is a `StorageError`.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # We truncate and write the file, so it must not be a link to another one.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            _held.add(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            if isinstance(error, BlockingIOError):
                raise RunInUseError(f"{self.path.parent} is in use by {_holder(self.path)}") from error
            raise StorageError(f"cannot lock {self.path}: {error.strerror}") from error
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode() + b"\n", 0)
        return self

    def __exit__(self, *error: object) -> None:
        # In a forked child, the descriptor is already closed, and its number may belong to another file.
        if self._descriptor in _held:
            os.ftruncate(self._descriptor, 0)  # an empty file marks a clean exit
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child just forked may keep it open after we close it
            self._close()

    def _close(self) -> None:
        if self._descriptor in _held:
            os.close(self._descriptor)
            _held.discard(self._descriptor)


def _holder(path: Path) -> str:
    """Describe the holder that the lock file names."""
    try:
        holder = json.loads(path.read_bytes())
        return f"process {holder['pid']} on host {holder['host']}, started {holder['started']}"
    except (OSError, ValueError):  # just created or emptied
        return "another process"
