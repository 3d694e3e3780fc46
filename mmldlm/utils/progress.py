"""Progress of a command on stderr: a bar on a terminal; regular plain lines in a log file, a pipe or CI."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

try:
    from tqdm import tqdm
except ImportError:  # what loads a bundle needs no bar
    tqdm = None  # type: ignore[assignment, misc]

from mmldlm.utils.format import human_duration
from mmldlm.utils.printable import printable
from mmldlm.utils.process import raise_if_stopped

INTERVAL_S = 10.0
_MIN_POLL_S = 1.0
_T = TypeVar("_T")


class Progress:
    """Reports the phases of a command, and how many items of the current phase are done. Use as a context manager.

    Without a bar, one line is printed when a phase begins, then another every `interval` seconds. A background thread
    prints during long calls as well, so that two lines are never further apart than twice the interval.
    """

    def __init__(self, enabled: bool = True, interval: float = INTERVAL_S):
        show_bar = enabled and tqdm is not None and sys.stderr.isatty()
        self._lines, self._interval = enabled and not show_bar, interval
        self._bar = tqdm(leave=False) if show_bar else None
        self._phase = self._unit = ""
        self._done = 0
        self._total: int | None = None
        self._phase_start = self._last_line = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Progress:
        if self._lines:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._bar is not None:
            self._bar.close()

    def phase(self, name: str, announce: bool = True) -> None:
        """Begin a phase, which ends the previous one. Without `announce` it is reported only if it takes long."""
        with self._lock:
            self._phase, self._unit, self._done, self._phase_start = name, "", 0, time.monotonic()
            if announce:
                self.line(f"{name} ...")
        if self._bar is not None:
            self._bar.set_description(name, refresh=False)
            self._bar.unit = ""
        self._restart_bar(None)

    def track(self, items: Iterable[_T], unit: str, total: int | None = None) -> Iterator[_T]:
        """Yield the items of the phase; each counts as done when the next one is requested."""
        self.advance(0, unit, total)
        for done, item in enumerate(items, 1):
            yield item
            self.advance(done, unit, total)

    def advance(self, done: int, unit: str, total: int | None = None) -> None:
        """Set the number of items of the phase that are done; a signal to stop ends the command here at the latest."""
        raise_if_stopped()
        # A smaller count or another total belongs to another loop of the same phase.
        if done < self._done or total != self._total or not self._unit:
            with self._lock:
                self._done, self._total = 0, total
            self._restart_bar(total)
        if self._bar is not None:
            self._bar.unit = f" {unit}"
            self._bar.update(done - self._done)
        self._unit, self._done = unit, done
        if done:
            self._report_if_due()

    def line(self, text: str) -> None:
        """Print a plain line, unless there is a bar."""
        if self._lines:
            self._last_line = time.monotonic()
            print_status(text)

    def _restart_bar(self, total: int | None) -> None:
        if self._bar is not None:
            self._bar.total = total
            self._bar.reset()

    def _watch(self) -> None:
        while not self._closed.wait(max(self._interval, _MIN_POLL_S)):
            self._report_if_due()

    def _report_if_due(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._lines or not self._phase or now - self._last_line < self._interval or self._closed.is_set():
                return
            done = f"{self._done:,}" if self._total is None else f"{self._done:,} of {self._total:,}"
            counted = f"{done} {self._unit}, " if self._unit else ""
            self.line(f"{self._phase}: {counted}{human_duration(now - self._phase_start)}")


def print_status(text: str) -> None:
    """Print lines on stderr, above the bar if there is one."""
    text = "\n".join(map(printable, text.split("\n")))
    if tqdm is None:
        print(text, file=sys.stderr)
    else:
        tqdm.write(text, file=sys.stderr)
