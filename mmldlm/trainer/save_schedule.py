"""When a checkpoint is due: by the step, by the clock, or because somebody asks for one."""

from __future__ import annotations

import time
from pathlib import Path

from mmldlm.config import CheckpointConfig
from mmldlm.trainer.signals import SignalRequests

REQUEST_FILE = "CHECKPOINT"
LOOK_EVERY_S = 1.0  # a look at a network file system takes its time


class SaveSchedule:
    """`due` is the same on every rank; `save_requested` is this rank's own, for all to agree on."""

    def __init__(self, config: CheckpointConfig, run_dir: Path, signals: SignalRequests, is_main: bool):
        self.config, self.signals, self.is_main = config, signals, is_main
        self.request = run_dir / REQUEST_FILE
        self._retention = config.retention
        self._saved_at = self._looked_at = time.monotonic()
        self._requested = False

    def due(self, step: int) -> bool:
        """Whether a run saves after `step` by the settings alone."""
        every = self.config.every_steps
        return bool(every and step % every == 0) or self._retention.is_permanent(step)

    def save_requested(self) -> bool:
        """Whether SIGUSR1 came to this process, or on rank 0 the file `CHECKPOINT` or the minute."""
        return self.signals.save or (self.is_main and (self._is_time() or self._is_requested()))

    def saved(self) -> None:
        """A checkpoint of this moment is made: all wishes are granted."""
        self.signals.save = self._requested = False
        self._saved_at = time.monotonic()

    def _is_time(self) -> bool:
        minutes = self.config.every_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _is_requested(self) -> bool:
        now = time.monotonic()
        if not self._requested and now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            if self.request.exists():
                self.request.unlink(missing_ok=True)
                self._requested = True
        return self._requested
