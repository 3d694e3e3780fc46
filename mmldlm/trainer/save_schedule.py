"""Schedule of checkpoints: by steps, by time, or on request."""

from __future__ import annotations

import time
from pathlib import Path

from mmldlm.config import CheckpointConfig
from mmldlm.trainer.signals import SignalRequests

REQUEST_FILE = "CHECKPOINT"
REQUEST_POLL_INTERVAL_S = 1.0  # since a look-up on a network file system is slow


class SaveSchedule:
    """Schedule of a run's checkpoints.

    `due` is the same on every rank; `save_requested` differs between ranks, which must agree on it.
    """

    def __init__(self, config: CheckpointConfig, run_dir: Path, signals: SignalRequests, is_main: bool):
        self.config, self.signals, self.is_main = config, signals, is_main
        self.request = run_dir / REQUEST_FILE
        self._retention = config.retention
        self._saved_at = self._polled_at = time.monotonic()
        self._requested = False

    def due(self, step: int) -> bool:
        """Return whether the settings demand a checkpoint after `step`."""
        every = self.config.every_steps
        return bool(every and step % every == 0) or self._retention.is_permanent(step)

    def save_requested(self) -> bool:
        """Return whether this process received SIGUSR1 or, on rank 0, the file `CHECKPOINT` exists or time is up."""
        return self.signals.save or (self.is_main and (self._interval_elapsed() or self._file_requested()))

    def saved(self) -> None:
        """Note that a checkpoint was started: clear all requests and restart the interval."""
        self.signals.save = self._requested = False
        self._saved_at = time.monotonic()

    def _interval_elapsed(self) -> bool:
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _file_requested(self) -> bool:
        now = time.monotonic()
        if not self._requested and now - self._polled_at >= REQUEST_POLL_INTERVAL_S:
            self._polled_at = now
            if self.request.exists():
                self.request.unlink(missing_ok=True)
                self._requested = True
        return self._requested
