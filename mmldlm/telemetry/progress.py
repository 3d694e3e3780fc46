"""One readable line per log event: updated in place on a terminal, printed plainly into a file.

A file also gets a line where there was none for long: while steps, a validation or a checkpoint take their time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

from mmldlm.utils.format import human_count, human_duration

WINDOW = 20  # log events over which the speed of the ETA is taken
SILENCE_S = 15.0  # between lines in a file; looked at as often

# What the line shows of the training values besides loss, speed and ETA, which come first: a terminal cuts the rest.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("loss/text", "text", "{:.4f}"),
    ("loss/latent", "latent", "{:.4f}"),
    ("optim/lr", "lr", "{:.2e}"),
    ("optim/grad_norm", "grad", "{:.2f}"),
)


class Progress:
    """The progress of steps `start_step` .. `total_steps` on `stream`; `clock` is in seconds."""

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
        self._step, self._doing, self._told = start_step, "training", clock()
        self._ended = threading.Event()
        # (step, seconds) of recent events. Evaluation and saving in between count: the ETA is of the whole run.
        self._recent: deque[tuple[int, float]] = deque([(start_step, clock())], maxlen=WINDOW + 1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._recent.append((step, self._clock()))
        line = self._line(step, values)
        if not self._in_place:
            self._print(line + "\n")
            return
        width = self._width()
        # One column stays free: many terminals wrap when the last one is written.
        self._print("\r" + line[: width - 1].ljust(width - 1))
        self._open_line = True

    def at(self, step: int, doing: str = "training") -> None:
        """The last step that is done, and what the run is doing now."""
        self._step, self._doing = step, doing

    def watch(self) -> None:
        """See to it, until `end`, that a file gets lines."""
        if not self._in_place:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(SILENCE_S):
            self.break_silence()

    def break_silence(self) -> None:
        """A line, where the last one is `SILENCE_S` or more ago."""
        silent = self._clock() - self._told
        if silent >= SILENCE_S:
            self._print(f"step {self._step:,}/{self.total_steps:,}  {self._doing} ... {human_duration(silent)}\n")

    def end(self) -> None:
        self._ended.set()
        self.close()

    def message(self, text: str) -> None:
        """A line of its own that stays."""
        self.close()
        self._print(text + "\n")

    def close(self) -> None:
        """End a line that was updated in place."""
        if self._open_line:
            self._print("\n")
            self._open_line = False

    def _print(self, text: str) -> None:
        """Where nobody reads any more, or the disk of a log is full, that is no reason to end a run."""
        self._told = self._clock()
        with suppress(OSError):
            print(text, end="", file=self._stream, flush=True)

    def eta_s(self) -> float | None:
        """Seconds to the last step at the speed of the recent ones; None until there is one."""
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
        parts += [f"{name} {form.format(values[key])}" for key, name, form in FIELDS if key in values]
        if skipped := values.get("health/skipped_steps"):
            parts.append(f"skipped {skipped:.0f}")
        return "  ".join(parts)

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80
