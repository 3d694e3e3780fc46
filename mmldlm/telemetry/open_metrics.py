"""`metrics.prom`: the latest numbers of a run as OpenMetrics text, which Prometheus' node_exporter reads as well.

A tag `group/name` becomes a gauge `mmldlm_group_name`. A mode in its name becomes the label `mode` ("all" if there is
none), and a unit at its end becomes seconds or bytes, as Prometheus counts them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mmldlm.utils.files import naming, temporary_name

NAME = "metrics.prom"  # node_exporter reads files with this suffix
INTERVAL_S = 5.0  # between two writes, so that short steps do not wait for the disk
# Suffix of a tag: suffix of a gauge, factor.
_UNITS = {"_per_s": ("_per_second", 1.0), "_s": ("_seconds", 1.0), "_mib": ("_bytes", float(2**20))}
_MODE = re.compile(r"(?:^|_)(l2t|t2l|joint)(?=_|$)")


class OpenMetricsFile:
    """The latest value of each number of a run, in a file of its own that is replaced as a whole.

    Losses by noise bin and by store are left out. A lost file costs nothing, so it is not flushed to the disk.
    """

    def __init__(self, folder: Path, total_steps: int):
        self.path = folder / NAME
        self.run, self.run_id, self._written_at = folder.absolute().name, "", 0.0
        self._values: dict[tuple[str, str], float] = {("mmldlm_planned_steps", "all"): total_steps}

    def update(self, step: int, values: Mapping[str, float], run_id: str = "", ended: bool = False) -> None:
        """Take the numbers of a record, and write the file if `INTERVAL_S` have passed, or the run has ended."""
        self.run_id = run_id or self.run_id
        for tag, value in values.items():
            if tag.count("/") == 1 and "_noise_" not in tag:
                name, mode, factor = _gauge(tag)
                self._values[name, mode] = value * factor
        self._values["mmldlm_step", "all"] = step
        self._values["mmldlm_ended", "all"] = ended
        self._values["mmldlm_last_record_timestamp_seconds", "all"] = time.time()
        if ended or time.monotonic() - self._written_at >= INTERVAL_S:
            self._write()
            self._written_at = time.monotonic()

    def _write(self) -> None:
        lines, previous = list[str](), ""
        for (name, mode), value in sorted(self._values.items()):
            if name != previous:
                lines.append(f"# TYPE {name} gauge")
                lines += [f"# UNIT {name} {unit}" for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")]
                previous = name
            labels = {"run": self.run, "run_id": self.run_id, "mode": mode}
            text = ",".join(f'{label}="{_escape(value)}"' for label, value in labels.items())
            lines.append(f"{name}{{{text}}} {_number(value)}")
        temporary = temporary_name(self.path)
        with naming(self.path):
            try:
                temporary.write_text("\n".join([*lines, "# EOF", ""]), encoding="utf-8")
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)


@cache
def _gauge(tag: str) -> tuple[str, str, float]:
    """Return the name of a tag's gauge, its mode, and the factor of its unit."""
    group, _, name = tag.partition("/")
    mode = _MODE.search(name)
    name = _MODE.sub("", name, count=1).strip("_")
    # A gauge must not end in `_total`, by which Prometheus marks counters.
    name = re.sub(r"\W", "_", f"mmldlm_{group}_{name}", flags=re.ASCII).removesuffix("_total").rstrip("_")
    for suffix, (unit, factor) in _UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit, mode[1] if mode else "all", factor
    return name, mode[1] if mode else "all", 1.0


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Return a number as OpenMetrics spells it."""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)
