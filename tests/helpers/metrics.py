"""Records of a run, as the tests look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return all records of a metrics file that may still be written to: a torn last line is left out."""
    lines, records = Path(path).read_bytes().splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            assert number == len(lines), f"{path}: line {number} is no record"
    return records
