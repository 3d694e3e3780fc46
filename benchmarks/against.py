"""One ladder against an earlier one: what has become worse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.errors import DataError

WORSE = 0.10  # share of the speed that may be lost
COUNTS = {  # and whether more of it is worse
    "operators": True,
    "kernels": True,
    "host_syncs": True,
    "logit_rows": True,
    "fill": False,
}
SAME = ("shape", "data", "precision", "batches", "task", "positions", "vocab_size")  # or they are not comparable


def read(path: Path, option: str) -> dict[str, Any]:
    """DataError, naming the option that gave the path, where it is no result of a ladder."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{option}: {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("benchmark") != "ladder":
        raise DataError(f"{option}: {path} is not a result of the ladder")
    return found


def regressions(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line for each that is worse: speeds beyond `WORSE` and both intervals, and any count.

    Speeds are compared where both results can be trusted and have the same base. DataError where they are of different
    work.
    """
    before, after = (json.loads(json.dumps(result["what"])) for result in (earlier, now))
    for key in SAME:
        if before[key] != after[key]:
            raise DataError(f"--against: {key} was {before[key]}, now it is {after[key]}; expected the same")
    timed = all(result["control"]["trusted"] for result in (earlier, now)) and earlier["base"] == now["base"]
    lines: list[str] = []
    for name, row in now["variants"].items():
        old = earlier["variants"].get(name)
        if old is None or "error" in old:
            continue
        if "error" in row:
            lines.append(f"{name}: {row['error']}")
            continue
        lines += [f"{name}: {line}" for line in _worse(old, row, timed)]
    return lines


def _worse(old: dict[str, Any], new: dict[str, Any], timed: bool) -> Iterator[str]:
    before, after = old["speed"], new["speed"]
    if timed and after["median"] < (1 - WORSE) * before["median"] and after["high"] < before["low"]:
        yield (
            f"speed {after['median']:.2f} [{after['low']:.2f}, {after['high']:.2f}], "
            f"was {before['median']:.2f} [{before['low']:.2f}, {before['high']:.2f}]"
        )
    for count, more_is_worse in COUNTS.items():
        if count in old["counts"] and count in new["counts"]:
            was, found = old["counts"][count], new["counts"][count]
            if found > was if more_is_worse else found < was:
                yield f"{count} {found:.6g}, was {was:.6g}"
