"""Warnings of Python and libraries: each once, on a line of its own, from one rank of each node."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.utils.short_repr import truncate

_MAX_CHARACTERS = 400
_EXPECTED = ("Gradient accumulation steps mismatch",)  # Accelerate's plugin; the engine counts micro-batches itself


class Notices(logging.Handler):
    """Context manager that sends warnings and log records to `write`, each once.

    PyTorch and DeepSpeed reset Python's own registry of past warnings in each step. Warnings of other packages are the
    same on all ranks of a node, so only one of them sets `log_library_warnings`.
    """

    def __init__(self, log_library_warnings: bool):
        super().__init__(logging.WARNING)
        self.log_library_warnings = log_library_warnings
        self.write: Callable[[str], None] = to_stderr
        self._seen: set[tuple[Any, ...]] = set()

    def __enter__(self) -> Notices:
        self._previous_showwarning, warnings.showwarning = warnings.showwarning, self._show_warning
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self)
        warnings.showwarning = self._previous_showwarning

    def write_to(self, write: Callable[[str], None]) -> None:
        """Send lines to `write` from now on."""
        self.write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, as `logging.Handler` requires."""
        text = record.getMessage()
        is_expected = any(expected in text for expected in _EXPECTED)
        # Only records of libraries are the same on all ranks of a node.
        if record.name.startswith("mmldlm") or (self.log_library_warnings and not is_expected):
            self._write_once((record.name, text), f"{record.levelname.lower()}: {text}")

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if self.log_library_warnings:
            source = f"{category.__name__} in {Path(filename).name}:{lineno}"
            self._write_once((category, str(message)), f"warning: {message} ({source})")

    def _write_once(self, key: tuple[Any, ...], text: str) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self.write(truncate(" ".join(text.split()), _MAX_CHARACTERS))


def to_stderr(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)
