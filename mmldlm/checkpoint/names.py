"""Names of checkpoint folders: `step-00000100`, or `step-00000100.1` if the step was saved again. Imports no torch."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def checkpoint_name(step: int, revision: int = 0) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08}" + (f".{revision}" if revision else "")


def step_and_revision(name: str) -> tuple[int, int] | None:
    """Return the step and revision in the name of a checkpoint's folder, or None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None
