"""What Python and libraries warn of: each once, in one line of its own, by one process of each node."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mmldlm.utils.short_repr import cut

_LONGEST = 400
_EXPECTED = ("Gradient accumulation steps mismatch",)  # Accelerate's plugin; the engine counts micro-batches itself


class Notices(logging.Handler):
    """Context manager within which warnings and log records go to `write`.

    PyTorch and DeepSpeed reset Python's own memory of what it has warned of in each step. What is not ours to say
    all processes of a node say alike, so only the one that `speaks` does.
    """

    def __init__(self, speaks: bool):
        super().__init__(logging.WARNING)
        self.speaks = speaks
        self.write: Callable[[str], None] = to_stderr
        self._said: set[tuple[Any, ...]] = set()

    def __enter__(self) -> Notices:
        self._before, warnings.showwarning = warnings.showwarning, self._show
        logging.getLogger().addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger().removeHandler(self)
        warnings.showwarning = self._before

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name.startswith("mmldlm") or (self.speaks and not any(known in text for known in _EXPECTED)):
            self._say((record.name, text), f"{record.levelname.lower()}: {text}")

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if self.speaks:
            place = f"{category.__name__} in {Path(filename).name}:{lineno}"
            self._say((category, str(message)), f"warning: {message} ({place})")

    def _say(self, key: tuple[Any, ...], text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.write(cut(" ".join(text.split()), _LONGEST))


def to_stderr(text: str) -> None:
    """A line of its own; where nobody listens any more, that is no reason to end a run."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
