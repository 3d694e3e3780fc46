"""Run folders written by hand: records as a trainer writes them, at times of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

T0 = 1e9  # Unix seconds of step 0
STEP_S = 2.0
Values = dict[str, Any]


def record(kind: str, step: int, after_s: float = 0.0, **values: Any) -> Values:
    """Return a record of a step, `after_s` seconds after its end; keys of values have "__" in place of "/"."""
    values = {key.replace("__", "/"): value for key, value in values.items()}
    return {"kind": kind, "step": step, "time": T0 + STEP_S * step + after_s, **values}


def train(first: int, last: int, every: int = 1, **metrics: float | Callable[[int], float] | None) -> list[Values]:
    """Return training records; a metric may depend on the step."""
    return [
        record(
            "train", step, **{"speed__step_s": STEP_S} | {k: v(step) if callable(v) else v for k, v in metrics.items()}
        )
        for step in range(first, last + 1, every)
    ]


def write_run(folder: Path, records: Iterable[Values], **files: Any) -> Path:
    """Write the folder of a run; `files` are the contents of its JSON files, such as `exit`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records), encoding="utf-8")
    for name, content in files.items():
        suffix = ".lock" if name == "run" else ".yaml" if name == "config" else ".json"
        (folder / f"{name}{suffix}").write_text(json.dumps(content), encoding="utf-8")
    return folder
