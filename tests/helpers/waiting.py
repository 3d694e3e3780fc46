"""Waiting for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

TEST_TIMEOUT_S = 300.0  # ends a real hang; a busy machine must not fail a test


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds; TimeoutError naming `what` after TEST_TIMEOUT_S."""
    ends = time.monotonic() + TEST_TIMEOUT_S
    while not condition():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what}: not within {TEST_TIMEOUT_S:g} s")
        time.sleep(0.02)
