"""One readable line per log event: updated in place on a terminal, appended to a file.

A file also gets a status line after a long pause, when steps, a validation or a checkpoint take their time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from mmldlm.utils.format import human_count, human_duration

ETA_WINDOW = 20  # log events over which the speed is averaged
STATUS_INTERVAL_S = 15.0  # without a line, after which a file gets a status line; also the polling interval

# Training values in the line after loss, speed and ETA, which come first since a terminal cuts the line: key, label and
# format.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("loss/text", "text", "{:.4f}"),
    ("loss/latent", "latent", "{:.4f}"),
    ("optim/lr", "lr", "{:.2e}"),
    ("optim/grad_norm", "grad", "{:.2f}"),
)


class ProgressLine:
    """Progress of steps `start_step` .. `total_steps` on `stream`, by default stderr; `clock` returns seconds."""

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self._stream = stream or sys.stderr
        self._in_place = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._open_line = False
        self._clock = clock
        self._step, self._activity, self._last_line = start_step, "training", clock()
        self._ended = threading.Event()
        # (step, seconds) of recent events, with evaluation and saving in between: the ETA is the one of the whole run.
        self._recent: deque[tuple[int, float]] = deque([(start_step, clock())], maxlen=ETA_WINDOW + 1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a training step."""
        self._recent.append((step, self._clock()))
        line = self._line(step, values)
        if not self._in_place:
            self._print(line + "\n")
            return
        width = self._width()
        # The last column is not used: many terminals wrap after it.
        self._print("\r" + line[: width - 1].ljust(width - 1))
        self._open_line = True

    def set_status(self, step: int, activity: str = "training") -> None:
        """Set the last finished step, and what the run is doing now."""
        self._step, self._activity = step, activity

    def start_status_thread(self) -> None:
        """Print status lines into a file until `end`."""
        if not self._in_place:
            threading.Thread(target=self._print_status_lines, daemon=True).start()

    def _print_status_lines(self) -> None:
        while not self._ended.wait(STATUS_INTERVAL_S):
            self.print_status_if_due()

    def print_status_if_due(self) -> None:
        """Print a status line if the last line is at least `STATUS_INTERVAL_S` ago."""
        elapsed = self._clock() - self._last_line
        if elapsed >= STATUS_INTERVAL_S:
            self._print(f"step {self._step:,}/{self.total_steps:,}  {self._activity} ... {human_duration(elapsed)}\n")

    def end(self) -> None:
        """Stop the status lines and finish the current line."""
        self._ended.set()
        self.close()

    def message(self, text: str) -> None:
        """Print a permanent line."""
        self.close()
        self._print(text + "\n")

    def close(self) -> None:
        """Finish a line that was updated in place."""
        if self._open_line:
            self._print("\n")
            self._open_line = False

    def _print(self, text: str) -> None:
        self._last_line = self._clock()
        print(text, end="", file=self._stream, flush=True)

    def eta_s(self) -> float | None:
        """Return the seconds to the last step at the speed of recent steps; None before the first of them."""
        (first_step, first_time), (step, now) = self._recent[0], self._recent[-1]
        if step <= first_step:
            return None
        return max(self.total_steps - step, 0) * (now - first_time) / (step - first_step)

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

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80
