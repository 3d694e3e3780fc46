"""How far a command is: a bar on a terminal; plain lines in a log file, a pipe or CI, never silent for long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from tqdm import tqdm

from mmldlm.utils.format import human_duration

INTERVAL_S = 10.0
_SHORTEST_S = 1.0  # between two looks of the thread
_T = TypeVar("_T")


class Progress:
    """The phases of a command, and within each how many items are done; on stderr. Use as a context manager.

    Where there is no bar, a line tells the beginning of each phase, then every `interval` seconds how far it is. A
    thread sees to that, so that one long call is not silent either: no two lines are further apart than twice the
    interval. With None there are the beginnings only.
    """

    def __init__(self, shown: bool = True, interval: float | None = INTERVAL_S, prefix: str = "", plain: bool = False):
        """`plain`: no bar, on a terminal either."""
        bars = shown and not plain and sys.stderr.isatty()
        self._lines, self._interval, self._prefix = shown and not bars, interval, prefix
        self._bar = tqdm(disable=not bars, leave=False)
        self._phase = self._unit = ""
        self._done = 0
        self._total: int | None = None
        self._began = self._told = time.monotonic()
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> Progress:
        if self._lines and self._interval is not None:
            threading.Thread(target=self._watch, args=(self._interval,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._bar.close()

    def phase(self, name: str, at_once: bool = True) -> None:
        """Begin a phase, which ends the one before; it is told at once, or only when it takes long."""
        with self._lock:
            self._phase, self._unit, self._began = name, "", time.monotonic()
            if at_once:
                self.line(f"{name} ...")
        self._bar.set_description(name, refresh=False)
        self._restart_bar("", None)

    def over(self, items: Iterable[_T], unit: str, total: int | None = None) -> Iterator[_T]:
        """The items of the phase, each done when the next one is asked for."""
        with self._lock:
            self._unit, self._done, self._total = unit, 0, total
        self._restart_bar(f" {unit}", total)
        for item in items:
            yield item
            self._done += 1
            self._bar.update()
            if self._interval is not None:
                self._tell_if_due(self._interval)

    def line(self, text: str) -> None:
        """A plain line, where there is no bar."""
        if self._lines:
            self._told = time.monotonic()
            say(self._prefix + text)

    def _restart_bar(self, unit: str, total: int | None) -> None:
        self._bar.unit, self._bar.total = unit, total
        self._bar.reset()

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(max(interval, _SHORTEST_S)):
            self._tell_if_due(interval)

    def _tell_if_due(self, interval: float) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._lines or not self._phase or now - self._told < interval or self._closed.is_set():
                return
            done = f"{self._done:,}" if self._total is None else f"{self._done:,} of {self._total:,}"
            counted = f"{done} {self._unit}, " if self._unit else ""
            self.line(f"{self._phase}: {counted}{human_duration(now - self._began)}")


def say(text: str) -> None:
    """A line on stderr, above the bar if there is one. Where nobody reads any more, that is no reason to end."""
    with suppress(OSError):
        tqdm.write(text, file=sys.stderr)
