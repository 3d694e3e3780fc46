"""Show snapshots as text, on a terminal of any width or in a file, and as JSON for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmldlm.tools.monitor.alerts import Alert
from mmldlm.tools.monitor.snapshot import Snapshot
from mmldlm.tools.runs import CURVE_KINDS
from mmldlm.utils.format import format_number, human_count, human_duration
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable

BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_SPARKLINE_COLUMNS = 32
_MAX_PER_BAR = 50  # values that a bar averages at most, so that a long run does not take longer to draw
_GIB = 2**30

_loss = partial(format_number, decimals=4)
# Name, tag, kind of records, number of records (0: all), and format of the latest value.
_CURVES: tuple[tuple[str, str, str, int, Callable[[float], str]], ...] = (
    ("loss", "loss/total", "train", 0, _loss),
    ("text", "loss/text", "train", 0, _loss),
    ("latent", "loss/latent", "train", 0, _loss),
    ("validation", "validation/total", "validation", 0, _loss),
    ("tokens/s", "speed/tokens_per_s", "train", 100, human_count),
    ("lr", "optim/lr", "train", 100, "{:.3g}".format),
    ("grad norm", "optim/grad_norm", "train", 100, "{:.3g}".format),
)

Look = tuple[Snapshot, Sequence[Alert]]


def sparkline(values: Sequence[float], columns: int = _SPARKLINE_COLUMNS, bars: str = BARS) -> str:
    """Draw `values` as at most `columns` bars, each for the mean of its part, or "x" if no value of it is finite."""
    count = min(columns, len(values))
    stride = len(values) // (_MAX_PER_BAR * columns) + 1
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count : stride] for i in range(count)]
    means = [statistics.fmean(finite) if (finite := list(filter(math.isfinite, part))) else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, height = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(bars) - 1
    return "".join(
        "x" if mean is None else bars[round((mean - low) / height * top) if height else top // 2] for mean in means
    )


def view(looks: Sequence[Look], bars: str = BARS) -> RenderableType:
    """Return the details of one run, or a row for each of several."""
    return _details(*looks[0], bars) if len(looks) == 1 else _rows(looks)


def _text(text: str, style: str = "") -> Text:
    """Return text from a run's files as one cropped line, with control characters escaped."""
    return Text(printable(text), style, no_wrap=True, overflow="crop")


def _rows(looks: Sequence[Look]) -> RenderableType:
    table = Table("run", "state", "step", "ETA", "loss", "news", "alert", box=None, pad_edge=False, header_style="dim")
    for run, alerts in looks:
        news = "" if run.news_age_s is None else f"{human_duration(run.news_age_s)} ago"
        losses = run.history.series("loss/total", "train").values
        more = f" (+{len(alerts) - 1})" if len(alerts) > 1 else ""
        alert = f"{alerts[0].name}{more}: {alerts[0].found}" if alerts else ""
        cells = [run.history.name, run.state.name, _progress(run), _eta(run), "".join(map(_loss, losses[-1:])), news]
        table.add_row(*map(_text, cells), _text(alert, "red"))
    return table


def _progress(run: Snapshot) -> str:
    step, total = run.history.step, run.history.total_steps
    if total:
        return f"{step:,}/{total:,} ({step / total:.0%})"
    return "starting" if run.state.is_active else ""


def _eta(run: Snapshot) -> str:
    return human_duration(run.eta_s) if run.eta_s is not None and run.state.name == "running" else ""


def _details(run: Snapshot, alerts: Sequence[Alert], bars: str) -> RenderableType:
    history = run.history
    head = [history.name, run.state.name, f"step {_progress(run)}" if history.total_steps else _progress(run)]
    if eta := _eta(run):
        head.append(f"ETA {eta}")
    if run.news_age_s is not None:
        head.append(f"{'news' if run.state.is_active else 'ended'} {human_duration(run.news_age_s)} ago")
    lines = ["  ".join(filter(None, head))]

    validation, speed = history.series("validation/total", "validation"), []
    if history.step_s:
        speed.append(f"{history.step_s:.3g} s/step")
    if run.data_wait_share is not None:
        speed.append(f"{run.data_wait_share:.0%} waiting for data")
    notes = {"tokens/s": ", ".join(speed), "grad norm": f"{len(history.by_kind('skip'))} steps skipped"}
    if validation.values:
        best = min(filter(math.isfinite, validation.values), default=math.nan)
        notes["validation"] = f"at step {validation.steps[-1]:,}, best {_loss(best)}"
    for name, tag, kind, count, form in _CURVES:
        if values := history.series(tag, kind).values:
            line = f"{sparkline(values[-count:], bars=bars):<{_SPARKLINE_COLUMNS}}"
            lines.append(f"  {name:<10} {form(values[-1]):>9}  {line}  {notes.get(name, '')}".rstrip())

    if run.memory:
        used = (f"{name} {used / 1024:.1f} of {limit / 1024:.1f} GiB" for name, used, limit in run.memory)
        lines.append(f"  {'memory':<10} {', '.join(used)}")
    checkpoint = history.last("checkpoint")
    saved = "none yet"
    if checkpoint is not None:
        saved = f"step {checkpoint['step']:,}, {human_duration(max(0.0, run.now - checkpoint['time']))} ago"
    lines.append(f"  {'checkpoint':<10} {saved}; {run.disk_free_bytes / _GIB:.1f} GiB free")

    raised = Table.grid(padding=(0, 1, 0, 0))
    for alert in alerts:
        raised.add_row("  !", Text(printable(f"{alert.name}: {alert.found}"), "red"))
        raised.add_row("", Text(printable(f"-> {alert.advice}")))
    return Group(*map(_text, lines), raised)


def to_json(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Return the list that `mmldlm monitor --json` prints. Unknown and non-finite values are None."""
    return replace_nonfinite([_to_dict(*look) for look in looks])


def _to_dict(run: Snapshot, alerts: Sequence[Alert]) -> dict[str, Any]:
    history, state, checkpoint = run.history, run.state, run.history.last("checkpoint")
    latest = (record for kind in CURVE_KINDS if (record := history.last(kind)))
    values = {tag: value for record in latest for tag, value in record.items() if "/" in tag and value is not None}
    return {
        "run": str(history.run_dir),
        "state": state.name,
        "code": state.code,
        "cause": state.cause,
        "step": history.step,
        "total_steps": history.total_steps,
        "eta_s": _rounded(run.eta_s),
        "news_age_s": _rounded(run.news_age_s),
        "values": values,
        "skipped_steps": len(history.by_kind("skip")),
        "data_wait_share": _rounded(run.data_wait_share),
        "memory": [
            {"of": name, "taken_mib": round(used), "limit_mib": round(limit)} for name, used, limit in run.memory
        ],
        "checkpoint": checkpoint and {"step": checkpoint["step"], "age_s": _rounded(run.now - checkpoint["time"])},
        "disk_free_gib": _rounded(run.disk_free_bytes / _GIB),
        "alerts": [asdict(alert) for alert in alerts],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
