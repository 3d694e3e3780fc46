"""Run folders cut off at an earlier step, as a monitor would have seen them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.runs import History


def seen_at(run: Path, step: int) -> Snapshot:
    """Return the snapshot of the moment at which the run wrote its last record of `step`."""
    folder = run.with_name(f"{run.name}-{step}")
    folder.mkdir(exist_ok=True)
    for name in ("config.yaml", "startup.json"):
        shutil.copy(run / name, folder)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step and '"kind": "end"' not in line]
    (folder / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    return Snapshot(History(folder), 10.0, now=json.loads(kept[-1])["time"])
