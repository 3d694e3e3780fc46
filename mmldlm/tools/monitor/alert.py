"""What a run needs attention for, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """`name` is one of the headings of the troubleshooting in docs/review.md."""

    name: str
    found: str
    advice: str
