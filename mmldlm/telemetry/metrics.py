"""`metrics.jsonl`: the machine-readable history of a run, one JSON object per line.

A record is `{"kind", "step", "time", ...values}`, with `time` in unix seconds. JSON has no NaN, so a value that is not
finite becomes null, and `nonfinite` lists its key.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mmldlm.errors import StorageError
from mmldlm.utils.files import is_at, naming, write_atomically

Kind = Literal[
    "train",
    "validation",
    "quality",
    "scalars",
    "start",
    "checkpoint",
    "mirror",
    "resume",
    "skip",
    "micro_batch",
    "heartbeat",
    "end",
]

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends records to `path` and flushes each one before `write` returns.

    A run writes a record before it writes anything else, so a deleted run folder is noticed here.

    With `resume_step`, records of later steps are dropped first, because training will write them again. Without it, a
    new file is started, and an existing one is kept as `<name>.old`.
    """

    def __init__(self, path: Path | str, resume_step: int | None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            if resume_step is None:
                self.path.replace(self.path.with_name(self.path.name + ".old"))
            else:
                _drop_after(self.path, resume_step)
        self._file = self.path.open("ab")

    def write(self, kind: Kind, step: int, values: Mapping[str, Any]) -> None:
        """Append a record. Raise `StorageError` if another file, or none, is at `path` by now."""
        assert values.keys().isdisjoint({"kind", "step", "time", "nonfinite"}), f"reserved keys in {[*values]}"
        if not self.is_in_place:
            raise StorageError(
                f"{self.path}: this run's file is no longer there, because its folder was moved or deleted; everything "
                "written so far moved with it"
            )
        nonfinite: list[str] = []
        record: dict[str, Any] = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        record |= {key: _plain(value, key, nonfinite) for key, value in values.items()}
        if nonfinite:
            record["nonfinite"] = nonfinite
        with naming(self.path):
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
            self._file.flush()

    @property
    def is_in_place(self) -> bool:
        """Return whether `path` still leads to the open file."""
        return is_at(self._file.fileno(), self.path)

    def sync(self) -> None:
        """Make the records survive a power failure. Flushing alone only lets them survive the process."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def recorded_run_id(path: Path) -> str | None:
    """Return the run id in the latest start record of a metrics file, or None. Version 0.1.0 wrote none."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    ids = (re.search(rb'^{"kind": "(?:start|resume)".*?"run_id": "(\w+)"', line) for line in reversed(lines))
    return next((found[1].decode() for found in ids if found), None)


def _drop_after(path: Path, step: int) -> None:
    """Rewrite `path` with the records up to `step`. Damaged lines are dropped with a warning."""
    lines, kept, damaged = path.read_bytes().splitlines(), [], 0
    for number, line in enumerate(lines, 1):
        try:
            # Complete a last line that lacks its newline, or the next record would be appended to it.
            kept += [line + b"\n"] if json.loads(line)["step"] <= step else []
        except (ValueError, KeyError, TypeError):
            damaged += number < len(lines)  # a kill leaves a torn last line, which needs no warning
    if damaged:
        log.warning("%s: %d damaged lines dropped", path, damaged)
    write_atomically(path, b"".join(kept))


def _plain(value: Any, key: str, nonfinite: list[str]) -> Any:
    """Convert `value` to JSON types. Dotted keys of non-finite numbers are added to `nonfinite`."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # torch or numpy scalar
        value = value.item()
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}", nonfinite) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}.{index}", nonfinite) for index, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(key)
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
