"""Runs as a monitor saw them at an earlier step: what is in their folders, cut off there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mmldlm.tools.history import History
from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.monitor.snapshot import Snapshot, Thresholds


def seen_at(run: Path, step: int, **thresholds: float) -> Snapshot:
    """A look at the moment at which the run wrote its last record of `step`."""
    folder = run.with_name(f"{run.name}-{step}")
    folder.mkdir(exist_ok=True)
    for name in ("config.yaml", "startup.json"):
        shutil.copy(run / name, folder)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step and '"kind": "end"' not in line]
    (folder / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    return Snapshot(History.read(folder), 10.0, Thresholds(**thresholds), now=json.loads(kept[-1])["time"])  # type: ignore[arg-type]


def alerts_at(run: Path, step: int, **thresholds: float) -> set[str]:
    return {alert.name for alert in alerts(seen_at(run, step, **thresholds))}
