"""Signals as requests to the loop: SIGINT and SIGTERM to save and stop after the present step, SIGUSR1 to save.

A second SIGINT ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class SignalRequests:
    """Context manager that records the signals of this process; the ranks agree on them in the loop."""

    STOP = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.stop: str | None = None  # name of the signal
        self.save = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalRequests:
        self._previous = {number: signal.signal(number, self._handle) for number in (*self.STOP, signal.SIGUSR1)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # A process that is stopping because of SIGTERM ignores further ones until it exits.
            leaving = number == signal.SIGTERM and handler == signal.SIG_DFL and self.stop is not None
            signal.signal(number, _do_nothing if leaving else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        if self.stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = signal.Signals(number).name


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that are started later do not inherit this."""
