"""Signals ask the training loop for something: `STOP_SIGNALS` to save and stop after this step, SIGUSR1 to save.

A second SIGINT ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from mmldlm.utils.process import STOP_SIGNALS, ignores_hangup, stop_reason


class SignalRequests:
    """Context manager that records the signals of this process. The loop makes all ranks act on them together."""

    def __init__(self) -> None:
        self.stop: str | None = None  # which signal asked for it
        self.save = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalRequests:
        numbers = {*STOP_SIGNALS, signal.SIGUSR1} - ({signal.SIGHUP} if ignores_hangup() else set())
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # SIGTERM and SIGHUP may come in pairs, so a stopping process ignores them until it exits. We do not use
            # SIG_IGN, because programs that are started later would inherit it.
            leaving = number in STOP_SIGNALS and handler == signal.SIG_DFL and self.stop is not None
            signal.signal(number, (lambda *_: None) if leaving else handler)

    def agree_to_stop(self) -> str:
        """Make this rank stop because some rank received a signal. Return which signal, as far as this rank knows."""
        self.stop = self.stop or "a signal on another rank"
        return self.stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        if self.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = stop_reason(number)
