"""The HTML page of a report: fills in `report.html.jinja`."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from mmldlm import __version__
from mmldlm.tools.report.comparison import Comparison, RunGroup, setting_differences
from mmldlm.tools.report.figures import COLORS
from mmldlm.tools.report.paired import pairing
from mmldlm.tools.report.run_summary import BEST, RunSummary, better_direction, is_metric_baseline
from mmldlm.utils.format import format_number, human_duration
from mmldlm.utils.intervals import CONFIDENCE

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_MAX_EVENTS = 300
_MAX_TEXTS = 8


@dataclass(frozen=True)
class ReportContent:
    """All data of a report.

    Attributes:
        groups: Groups of runs, the baseline first.
        branches: Branches that the runs have left, each alone; they are drawn, and not compared.
        comparisons: Of each other group with the baseline, up to `max_step`.
        figures: By name of each figure, the titles of the panels that it has no room for.
        created_at: Creation time, in UTC.
    """

    groups: Sequence[RunGroup]
    branches: Sequence[RunGroup]
    comparisons: Sequence[Comparison]
    max_step: int
    figures: Mapping[str, Sequence[str]]
    created_at: datetime

    @property
    def drawn(self) -> list[RunGroup]:
        """The groups and the branches."""
        return [*self.groups, *self.branches]

    @property
    def runs(self) -> list[RunSummary]:
        """All runs, in the order of their groups, and all branches."""
        return [run for group in self.drawn for run in group.runs]


def render_page(content: ReportContent, folder: Path) -> str:
    """Return the HTML of the whole page, with the figures in `folder`; text from the files of runs is escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=format_number, duration=human_duration, utc=_format_time, json=partial(json.dumps, default=str)
    )
    evaluated = [run for group in content.groups for run in group.runs if run.evaluation_metrics]
    keys = dict.fromkeys(key for run in evaluated for key in run.evaluation_metrics)
    headings = {
        "runs": "Runs",
        "comparison": "Comparison" if content.comparisons else "",
        "differences": "What differs" if len(content.groups) > 1 else "",
        "loss": "Loss",
        "quality": "Quality" if evaluated or "quality" in content.figures else "",
        "events": "Events",
    }
    events = sorted(((run, event) for run in content.runs for event in run.events), key=lambda row: row[1].time)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        content=content,
        title=", ".join(group.title for group in content.groups),
        version=__version__,
        colors=COLORS,
        sections={name: heading for name, heading in headings.items() if heading},
        images={name: b64encode((folder / f"{name}.png").read_bytes()).decode() for name in content.figures},
        best_validation=BEST,
        better_direction=better_direction,
        pairing=pairing,
        setting_rows=setting_differences(content.groups),
        evaluated=evaluated,
        evaluation_keys=[key for key in keys if not is_metric_baseline(key)],
        evaluation_baseline_keys=[key for key in keys if is_metric_baseline(key)],
        max_texts=_MAX_TEXTS,
        events=events[-_MAX_EVENTS:],
        num_omitted_events=max(0, len(events) - _MAX_EVENTS),
        confidence=CONFIDENCE,
    )


def _format_time(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"
