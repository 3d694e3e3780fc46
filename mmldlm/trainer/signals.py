"""Signals as requests to the loop: `STOP_SIGNALS` to save and stop after the present step, SIGUSR1 to save.

A second SIGINT ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from mmldlm.utils.process import STOP_SIGNALS, ignores_hangup, stop_reason


class SignalRequests:
    """Context manager that records the signals of this process; the ranks agree on them in the loop."""

    def __init__(self) -> None:
        self.stop: str | None = None  # what has asked for it
        self.save = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalRequests:
        numbers = {*STOP_SIGNALS, signal.SIGUSR1} - ({signal.SIGHUP} if ignores_hangup() else set())
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # A process that is stopping ignores SIGTERM and SIGHUP, which may come in pairs, until it exits; not by
            # SIG_IGN, which programs that are started later would inherit.
            leaving = number in STOP_SIGNALS and handler == signal.SIG_DFL and self.stop is not None
            signal.signal(number, (lambda *_: None) if leaving else handler)

    def agree_to_stop(self) -> str:
        """Have this rank stop, since one of them has been asked to; return what has asked for it."""
        self.stop = self.stop or "a signal on another rank"
        return self.stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        if self.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = stop_reason(number)
