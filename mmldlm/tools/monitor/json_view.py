"""A snapshot of a run as plain values, for programs; `terminal.py` shows the same to people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmldlm.tools.history.run_history import CURVE_KINDS
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot

_GIB = 2**30


def snapshot_to_dict(snapshot: Snapshot, alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the JSON object that `mmldlm monitor --json` prints; unknown and non-finite values are None."""
    history, state, checkpoint = snapshot.history, snapshot.state, snapshot.history.last("checkpoint")
    return {
        "run": str(history.run_dir),
        "state": state.name,
        "code": state.code,
        "cause": state.cause,
        "step": history.step,
        "total_steps": history.total_steps,
        "eta_s": _rounded(snapshot.eta_s),
        "news_age_s": _rounded(snapshot.news_age_s),
        "values": latest_values(snapshot),
        "skipped_steps": len(history.by_kind("skip")),
        "data_wait_share": _rounded(snapshot.data_wait_share),
        "memory": [
            {"of": name, "taken_mib": round(used), "limit_mib": round(limit)} for name, used, limit in snapshot.memory
        ],
        "checkpoint": checkpoint and {"step": checkpoint["step"], "age_s": _rounded(snapshot.now - checkpoint["time"])},
        "disk_free_gib": _rounded(snapshot.disk_free_bytes / _GIB),
        "alerts": [asdict(alert) for alert in alerts],
    }


def latest_values(snapshot: Snapshot) -> dict[str, float | None]:
    """Return the numbers of the latest training and validation record, by tag; None if not finite."""
    values: dict[str, float | None] = {}
    for kind in CURVE_KINDS:
        latest = snapshot.history.last(kind) or {}
        numbers = {key: value for key, value in latest.items() if "/" in key and isinstance(value, int | float)}
        values |= {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return values


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
