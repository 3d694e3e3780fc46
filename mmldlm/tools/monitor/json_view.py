"""One look at a run as plain values, for programs; people get the same by `view.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmldlm.tools.history.run_history import CURVES
from mmldlm.tools.monitor.alert import Alert
from mmldlm.tools.monitor.snapshot import Snapshot

_GIB = 2**30


def summary(look: Snapshot, alerts: Sequence[Alert]) -> dict[str, Any]:
    """As `mmldlm monitor --json` prints it: what is not known or not finite is null."""
    history, state, saved = look.history, look.state, look.history.last("checkpoint")
    return {
        "run": str(history.run_dir),
        "state": state.name,
        "code": state.code,
        "cause": state.cause,
        "step": history.step,
        "total_steps": history.total_steps,
        "eta_s": _rounded(look.eta_s),
        "news_age_s": _rounded(look.news_age_s),
        "values": latest_values(look),
        "skipped_steps": len(history.of("skip")),
        "data_wait_share": _rounded(look.data_wait),
        "memory": [{"of": what, "taken_mib": round(mib), "limit_mib": round(most)} for what, mib, most in look.memory],
        "checkpoint": saved and {"step": saved["step"], "age_s": _rounded(look.now - saved["time"])},
        "disk_free_gib": _rounded(look.disk_free / _GIB),
        "alerts": [asdict(alert) for alert in alerts],
    }


def latest_values(look: Snapshot) -> dict[str, float | None]:
    """The numbers of the latest training and validation record."""
    found: dict[str, float | None] = {}
    for kind in CURVES:
        latest = look.history.last(kind) or {}
        numbers = {key: value for key, value in latest.items() if "/" in key and isinstance(value, int | float)}
        found |= {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
