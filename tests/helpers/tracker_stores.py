"""What the local stores of experiment trackers hold, read without the code that wrote it."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mmldlm.telemetry.tracker_bridges import PACKAGES

# (step, Unix milliseconds, tag, value): a number; NaN as "nan", so that values compare
Point = tuple[int, int, str, float | str]
Rows = list[list[Point]]

TRACKERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not all(map(find_spec, packages)), reason=f"{name} is not installed: pip install -e '.[{name}]'"
        ),
    )
    for name, packages in PACKAGES.items()
]


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables with which each tracker writes into the folder of its name below `folder`."""
    return {
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder / "wandb"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow/mlflow.db",
    }


def rows_of_file(run_dir: Path, tracker: str, last: float = math.inf) -> Rows:
    """Return the points of each record with scalars up to step `last` of `metrics.jsonl`, as the tracker keeps them."""
    rows = []
    lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]  # without a torn last one
    for line in lines:
        record = json.loads(line)
        if record["kind"] in ("train", "validation", "quality") and record["step"] <= last:
            values = {key: value for key, value in record.items() if isinstance(value, int | float) and "/" in key}
            values |= dict.fromkeys(record.get("nonfinite", []), math.nan)
            rows.append(_points(record["step"], round(record["time"] * 1000), values))
    if tracker != "mlflow":
        return rows
    return _in_one_row([(step, ms, tag.replace("+", "_"), value) for row in rows for step, ms, tag, value in row])


def rows_of_tracker(name: str, folder: Path) -> dict[str, Rows]:
    """Return the points of each of the tracker's runs, by the name of the run, in rows where the tracker has rows."""
    readers = {"trackio": _trackio, "wandb": _wandb, "mlflow": _mlflow}
    return readers[name](folder / name)


def config_of_tracker(name: str, folder: Path) -> dict[str, Any]:
    """Return the config of the tracker's only run."""
    folder = folder / name
    if name == "trackio":
        ((config,),) = _query(folder / "mmldlm.db", "SELECT config FROM configs")
        return dict(json.loads(config))
    if name == "mlflow":
        return dict(_query(folder / "mlflow.db", "SELECT key, value FROM params"))
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    (run,) = [record.run for record in _wandb_records(path) if record.WhichOneof("record_type") == "run"]
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def _points(step: int, time_ms: int, values: Mapping[str, float]) -> list[Point]:
    return sorted(
        (step, time_ms, tag, "nan" if isinstance(value, str) or math.isnan(value) else float(value))
        for tag, value in values.items()
    )


def _query(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def _in_one_row(points: list[Point]) -> Rows:
    """Return all points in one row, since MLflow has none."""
    return [sorted(points, key=str)]


def _trackio(folder: Path) -> dict[str, Rows]:
    runs: dict[str, Rows] = {}
    query = "SELECT run_name, step, timestamp, metrics FROM metrics ORDER BY id"
    for run, step, timestamp, metrics in _query(folder / "mmldlm.db", query):
        time_ms = round(datetime.fromisoformat(timestamp).timestamp() * 1000)
        runs.setdefault(run, []).append(_points(step, time_ms, json.loads(metrics)))
    return runs


def _mlflow(folder: Path) -> dict[str, Rows]:
    runs: dict[str, list[Point]] = {}
    query = "SELECT name, step, timestamp, key, value, is_nan FROM metrics JOIN runs USING (run_uuid)"
    for run, step, time_ms, key, value, is_nan in _query(folder / "mlflow.db", query):
        runs.setdefault(run, []).extend(_points(step, time_ms, {key: math.nan if is_nan else value}))
    return {run: _in_one_row(points) for run, points in runs.items()}


def _wandb(folder: Path) -> dict[str, Rows]:
    runs: dict[str, Rows] = {}
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        records = list(_wandb_records(path))
        (name,) = [record.run.display_name for record in records if record.WhichOneof("record_type") == "run"]
        assert name not in runs, f"two folders of {name}: {sorted(folder.glob('wandb/*'))}"
        history = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
        runs[name] = rows_of_wandb(
            [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in history]
        )
    return runs


def rows_of_wandb(history: list[dict[str, Any]]) -> Rows:
    """Return the points of W&B's rows, whose numbers must be those of the rows."""
    assert [row["_step"] for row in history] == list(range(len(history)))
    return [
        _points(row["step"], round(row["_timestamp"] * 1000), {tag: v for tag, v in row.items() if "/" in tag})
        for row in history
    ]


def _wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a transaction log: a header, then fragments that do not cross blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, fragments = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        rest = 2**15 - position % 2**15
        if rest < 7:  # padding
            position += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        fragments += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # full, or the last fragment
            record = Record()
            record.ParseFromString(fragments)
            fragments = b""
            yield record
