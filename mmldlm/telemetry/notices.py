"""Prints each warning of Python and of libraries once, on its own line, and from one rank of each node."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.names import checkpoint_name
from mmldlm.utils.progress import print_status
from mmldlm.utils.short_repr import truncate

_MAX_CHARACTERS = 400
_EXPECTED = (
    "Gradient accumulation steps mismatch"  # Accelerate warns of this, but our engine counts micro-batches itself
)


class Notices(logging.Handler):
    """Context manager that sends warnings and log records to `write`, each once.

    Python's own registry of past warnings does not help: PyTorch and DeepSpeed reset it in each step. All ranks of a
    node get the same warnings from other packages, so only one rank of a node sets `log_library_warnings`.
    """

    def __init__(self, log_library_warnings: bool):
        super().__init__(logging.WARNING)
        self.log_library_warnings = log_library_warnings
        self.write: Callable[[str], None] = print_status
        self._seen: set[tuple[str, str]] = set()

    def __enter__(self) -> Notices:
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self)
        logging.captureWarnings(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record, as `logging.Handler` requires."""
        text = record.getMessage()
        if record.name == "py.warnings":  # drop the source line below the message
            text = text.partition("\n  ")[0]
        text = truncate(" ".join(text.split()), _MAX_CHARACTERS)
        # Our own records may differ between the ranks of a node.
        is_wanted = record.name.startswith("mmldlm") or (self.log_library_warnings and _EXPECTED not in text)
        if is_wanted and (record.name, text) not in self._seen:
            self._seen.add((record.name, text))
            self.write(f"{record.levelname.lower()}: {text}")


def overfitting_notice(found: Mapping[str, Any], run_dir: Path) -> str:
    """Return a line for the user about the result of `TrainState.overfitting`."""
    best = run_dir / "checkpoints" / checkpoint_name(found["lowest_step"])
    return (
        f"overfitting: {found['metric']} is {found['loss']:.4g} and was {found['lowest']:.4g} at step "
        f"{found['lowest_step']:,}: use --checkpoint {best}, which checkpoint.keep_best keeps, or train on more data; "
        "train.stop_after_worse ends such a run early"
    )
