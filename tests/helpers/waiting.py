"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0  # ends a real hang; no test may fail because the machine has other things to do


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds; TimeoutError naming `what` after PATIENCE_S."""
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s")
        time.sleep(0.02)
