"""`Alert`: a condition of a run that needs attention, and the advice for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alert:
    """`name` is a heading of the troubleshooting section in docs/review.md, `found` is the observation."""

    name: str
    found: str
    advice: str
