"""Progress on stderr: a bar or a line in place on a terminal, plain lines in a log file, a pipe or CI."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO, TypeVar

try:
    from tqdm import tqdm
except ImportError:  # loading a bundle needs no bar
    tqdm = None  # type: ignore[assignment, misc]

from mmldlm.utils.format import human_count, human_duration
from mmldlm.utils.printable import printable
from mmldlm.utils.process import raise_if_stopped

INTERVAL_S = 10.0  # seconds between two lines of a command
STATUS_INTERVAL_S = 15.0  # seconds of silence in a training run before a status line
ETA_WINDOW = 20  # log events over which the speed is averaged
_MIN_POLL_S = 1.0
_T = TypeVar("_T")

# Values of the line, as key, label and format. Loss, speed and ETA come before them, because a terminal cuts the line.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("loss/text", "text", "{:.4f}"),
    ("loss/latent", "latent", "{:.4f}"),
    ("optim/lr", "lr", "{:.2e}"),
    ("optim/grad_norm", "grad", "{:.2f}"),
)


def print_status(text: str, stream: TextIO | None = None) -> None:
    """Print lines on a stream (default stderr), above a bar if there is one."""
    stream, text = stream or sys.stderr, "\n".join(map(printable, text.split("\n")))
    if tqdm is not None and stream.isatty():  # only a terminal has bars
        tqdm.write(text, file=stream)
    else:
        print(text, file=stream, flush=True)


class _Lines:
    """Print lines on a stream. Without a terminal, a thread prints `_status()` after `interval` seconds of silence."""

    def __init__(self, interval: float, stream: TextIO, clock: Callable[[], float] = time.monotonic):
        self._interval, self._stream, self._clock = interval, stream, clock
        self._in_place = tqdm is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._last_line = clock()
        self._lock, self._ended = threading.Lock(), threading.Event()

    def start_status_thread(self) -> None:
        """Print status lines until the end. They are never further apart than twice the interval."""
        if not self._in_place:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(max(self._interval, _MIN_POLL_S)):
            self.print_status_if_due()

    def print_status_if_due(self) -> None:
        """Print a status line if the last line is at least `interval` seconds old."""
        with self._lock:
            is_due = self._clock() - self._last_line >= self._interval and not self._ended.is_set()
            if is_due and not self._in_place and (status := self._status()):
                self.message(status)

    def _status(self) -> str:
        raise NotImplementedError

    def message(self, text: str) -> None:
        """Print permanent lines above the line in place."""
        self._last_line = self._clock()
        print_status(text, self._stream)


class Progress(_Lines):
    """Report the phases of a command, and how many items of the phase are done. Use as a context manager.

    A terminal shows a bar. A file gets a line when a phase begins, then another every `interval` seconds.
    """

    def __init__(self, enabled: bool = True, interval: float = INTERVAL_S):
        super().__init__(interval, sys.stderr)
        self._enabled = enabled
        self._bar = tqdm(leave=False) if enabled and self._in_place else None
        self._phase = self._unit = ""
        self._done, self._phase_start = 0, self._clock()
        self._total: int | None = None

    def __enter__(self) -> Progress:
        if self._enabled:
            self.start_status_thread()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()

    def phase(self, name: str, announce: bool = True) -> None:
        """Begin a phase and end the previous one. Without `announce`, it is reported only if it takes long."""
        with self._lock:
            self._phase, self._phase_start = name, self._clock()
            self._done, self._unit, self._total = 0, "", None
            if announce:
                self.line(f"{name} ...")
        if self._bar is not None:
            self._bar.total, self._bar.unit = None, ""
            self._bar.set_description(name, refresh=False)
            self._bar.reset()

    def track(self, items: Iterable[_T], unit: str, total: int | None = None) -> Iterator[_T]:
        """Yield the items of the phase. An item counts as done when the next one is requested."""
        self.advance(0, unit, total)
        for done, item in enumerate(items, 1):
            yield item
            self.advance(done, unit, total)

    def advance(self, done: int, unit: str, total: int | None = None) -> None:
        """Set how many items of the phase are done. A signal to stop ends the command here at the latest."""
        raise_if_stopped()
        with self._lock:
            self._done, self._unit, self._total = done, unit, total
        if self._bar is not None:
            self._bar.unit = f" {unit}"
            if total != self._bar.total:  # the phase has begun another loop
                self._bar.total = total
                self._bar.reset()
            self._bar.update(done - self._bar.n)
        if done and self._enabled:
            self.print_status_if_due()

    def line(self, text: str) -> None:
        """Print a plain line, unless there is a bar."""
        if self._enabled and not self._in_place:
            self.message(text)

    def _status(self) -> str:
        done = f"{self._done:,}" if self._total is None else f"{self._done:,} of {self._total:,}"
        counted = f"{done} {self._unit}, " if self._unit else ""
        return f"{self._phase}: {counted}{human_duration(self._clock() - self._phase_start)}" if self._phase else ""


class ProgressLine(_Lines):
    """Progress of a training run from `start_step` to `total_steps`: a line for each log event.

    A terminal updates the line in place. A file also gets a line after a long pause, while steps, a validation or a
    checkpoint take their time.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(STATUS_INTERVAL_S, stream or sys.stderr, clock)
        self.total_steps = total_steps
        self._step, self._activity = start_step, "training"
        self._bar: tqdm | None = None
        # (step, seconds) of recent events. Validations and saves in between count: the ETA is for the whole run.
        self._recent: deque[tuple[int, float]] = deque([(start_step, clock())], maxlen=ETA_WINDOW + 1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a training step."""
        self._recent.append((step, self._clock()))
        line = self._line(step, values)
        if not self._in_place:
            self.message(line)
            return
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            width = 80
        if self._bar is None:  # we give a size: without one, tqdm shows nothing on a terminal of unknown size
            self._bar = tqdm(bar_format="{desc}", file=self._stream, ncols=width, nrows=20)
        self._bar.ncols = width
        # Leave the last column free, because many terminals wrap after it.
        self._bar.set_description_str(line[: width - 1])

    def set_status(self, step: int, activity: str = "training") -> None:
        """Set the last finished step and the run's current activity."""
        self._step, self._activity = step, activity

    def close(self) -> None:
        """Finish the line that was updated in place."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def end(self) -> None:
        """Stop the status lines and finish the current line."""
        self._ended.set()
        self.close()

    def eta_s(self) -> float | None:
        """Return the seconds to the last step at the speed of recent steps, or None before the first one."""
        (first_step, first_time), (step, now) = self._recent[0], self._recent[-1]
        if step <= first_step:
            return None
        return max(self.total_steps - step, 0) * (now - first_time) / (step - first_step)

    def _status(self) -> str:
        elapsed = human_duration(self._clock() - self._last_line)
        return f"step {self._step:,}/{self.total_steps:,}  {self._activity} ... {elapsed}"

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        parts = [f"step {step:,}/{self.total_steps:,} ({step / max(self.total_steps, 1):.0%})"]
        if "loss/total" in values:
            parts.append(f"loss {values['loss/total']:.4f}")
        if "speed/tokens_per_s" in values:
            parts.append(f"{human_count(values['speed/tokens_per_s'])} tokens/s")
        if (eta := self.eta_s()) is not None:
            parts.append(f"ETA {human_duration(eta)}")
        parts += [f"{name} {spec.format(values[key])}" for key, name, spec in FIELDS if key in values]
        if skipped := values.get("health/skipped_steps"):
            parts.append(f"skipped {skipped:.0f}")
        return "  ".join(parts)
