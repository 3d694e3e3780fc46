"""A snapshot of a run as text for a terminal of any width or a file, and as JSON for programs."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmldlm.tools.monitor.alerts import Alert
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.report.paired import paired_difference
from mmldlm.tools.run_history import CURVE_KINDS, Series
from mmldlm.utils.format import format_number, human_count, human_duration
from mmldlm.utils.printable import printable

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_SPARKLINE_COLUMNS = 32
_RECENT_RECORDS = 100  # records of a sparkline that is not of a loss: only the recent ones matter

_LOSSES = (("loss/total", "loss"), ("loss/text", "text"), ("loss/latent", "latent"))
_GIB = 2**30


def sparkline(values: Sequence[float], columns: int = _SPARKLINE_COLUMNS, bars: str = BARS) -> str:
    """Return `values` as at most `columns` bars, each the mean of its part; "x" where no value is finite."""
    count = min(columns, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [statistics.fmean(finite) if (finite := list(filter(math.isfinite, part))) else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, height = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(bars) - 1
    return "".join(
        "x" if mean is None else bars[round((mean - low) / height * top) if height else top // 2] for mean in means
    )


@dataclass(frozen=True)
class TerminalView:
    """Lines of text that show a run.

    Attributes:
        width: Columns to which lines are cut.
        unicode: Draw sparklines with Unicode characters instead of ASCII.
        color: Print alerts in red.
    """

    snapshot: Snapshot
    alerts: Sequence[Alert]
    width: int = 100
    unicode: bool = True
    color: bool = False

    def lines(self) -> list[str]:
        """Return the lines, without newlines."""
        plain = [self._head(), *self._losses(), *self._speed(), *self._optimizer(), *self._resources()]
        # Cut before any color is added: an escape sequence must not be cut.
        lines = [printable(line)[: self.width] for line in plain]
        for alert in self.alerts:
            lines += [self._red(line) for line in self._wrap(f"{alert.name}: {alert.found}", "  ! ", "    ")]
            lines += self._wrap(alert.advice, "    -> ", "       ")
        return lines

    def row(self) -> str:
        """Return one line: the head, and the most urgent alert."""
        head = printable(self._head())[: self.width]
        if not self.alerts:
            return head
        more = f" (+{len(self.alerts) - 1})" if len(self.alerts) > 1 else ""
        alert = printable(f"  ! {self.alerts[0].name}{more}: {self.alerts[0].found}")
        return head + self._red(alert[: max(0, self.width - len(head))])

    def _red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self.color else text

    def _wrap(self, text: str, first_indent: str, indent: str) -> list[str]:
        text = printable(text)  # of the files of a run
        return textwrap.wrap(text, max(40, self.width), initial_indent=first_indent, subsequent_indent=indent)

    def _head(self) -> str:
        snapshot, history = self.snapshot, self.snapshot.history
        parts = [history.name, snapshot.state.name]
        total = history.total_steps
        if total:
            parts.append(f"step {history.step:,}/{total:,} ({history.step / total:.0%})")
        elif snapshot.state.is_active:
            parts.append("starting")
        if snapshot.eta_s is not None and snapshot.state.name == "running":
            parts.append(f"ETA {human_duration(snapshot.eta_s)}")
        if snapshot.news_age_s is not None:
            parts.append(f"{'news' if snapshot.state.is_active else 'ended'} {human_duration(snapshot.news_age_s)} ago")
        return "  ".join(parts)

    def _losses(self) -> list[str]:
        lines = []
        for tag, name in _LOSSES:
            series = self.snapshot.history.series(tag, "train")
            if series.values:
                lines.append(self._row(name, format_number(series.values[-1], 4), series, ""))
        series = self.snapshot.history.series("validation/total", "validation")
        if series.values:
            best = min(filter(math.isfinite, series.values), default=math.nan)
            note = f"at step {series.steps[-1]:,}, best {format_number(best, 4)}"
            lines.append(self._row("validation", format_number(series.values[-1], 4), series, note))
        return lines

    def _speed(self) -> list[str]:
        series = self._recent("speed/tokens_per_s")
        if not series.values:
            return []
        step_s, wait = self.snapshot.history.step_s, self.snapshot.data_wait_share
        notes = [f"{step_s:.3g} s/step"] if step_s else []
        notes += [f"{wait:.0%} waiting for data"] if wait is not None else []
        speed = series.values[-1]
        return [self._row("tokens/s", human_count(speed) if math.isfinite(speed) else "nan", series, ", ".join(notes))]

    def _optimizer(self) -> list[str]:
        lines = []
        for tag, name in (("optim/lr", "lr"), ("optim/grad_norm", "grad norm")):
            series = self._recent(tag)
            if series.values:
                skipped = len(self.snapshot.history.by_kind("skip"))
                note = f"{skipped} steps skipped" if name == "grad norm" else ""
                lines.append(self._row(name, f"{series.values[-1]:.3g}", series, note))
        return lines

    def _resources(self) -> list[str]:
        snapshot = self.snapshot
        parts = [f"{name} {used / 1024:.1f} of {limit / 1024:.1f} GiB" for name, used, limit in snapshot.memory]
        lines = [f"  {'memory':<10} {', '.join(parts)}"] if parts else []
        checkpoint = snapshot.history.last("checkpoint")
        saved = "none yet"
        if checkpoint is not None:
            saved = f"step {checkpoint['step']:,}, {human_duration(max(0.0, snapshot.now - checkpoint['time']))} ago"
        lines.append(f"  {'checkpoint':<10} {saved}; {snapshot.disk_free_bytes / _GIB:.1f} GiB free")
        return lines

    def _recent(self, tag: str) -> Series:
        steps, values, times = self.snapshot.history.series(tag, "train")
        return Series(steps[-_RECENT_RECORDS:], values[-_RECENT_RECORDS:], times[-_RECENT_RECORDS:])

    def _row(self, name: str, value: str, series: Series, note: str) -> str:
        bars = sparkline(series.values, bars=BARS if self.unicode else PLAIN_BARS)
        return f"  {name:<10} {value:>9}  {bars:<{_SPARKLINE_COLUMNS}}  {note}".rstrip()


def paired_lines(snapshots: Sequence[Snapshot], width: int) -> list[str]:
    """Return a line with the difference of each run's loss from that of the first, if they are paired."""
    first, *others = (snapshot.history for snapshot in snapshots)
    differences = [(history.name, paired_difference(first, history)) for history in others]
    return [printable(f"{name} - {first.name}: {one}")[:width] for name, one in differences if one]


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
        numbers = {key: value for key, value in latest.items() if "/" in key and value is not None}
        values |= {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    return values


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
