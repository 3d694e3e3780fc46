"""The HTML page of a report: fills in `report.html.jinja`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from mmldlm import __version__
from mmldlm.tools.report.comparison import MetricComparison, RunGroup, config_differences, environment_differences
from mmldlm.tools.report.figures import COLORS, EVENT_MARKERS, RenderedFigure
from mmldlm.tools.report.paired import PairedComparison
from mmldlm.tools.report.run_summary import (
    BEST,
    BEST_RULE,
    EVALUATION,
    EVALUATION_RULE,
    SUMMARY_RULES,
    Event,
    RunSummary,
    better_direction,
    is_metric_baseline,
)
from mmldlm.utils.format import format_number, human_duration
from mmldlm.utils.ratio import CONFIDENCE, SEEDS_METHOD

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_MAX_EVENTS = 20  # per kind and run
_MAX_TEXTS = 8


@dataclass(frozen=True)
class ReportContent:
    """All data of a report.

    Attributes:
        groups: Groups of runs, the baseline first.
        branches: Branches that the runs have left, each alone; they are drawn, and not compared.
        comparisons: Metrics that the baseline shares with other groups, up to `max_step`.
        figures: Rendered figures, in the order of the page.
        created_at: Creation time, in UTC.
        paired: Paired comparisons of the groups that have runs of the baseline's seeds.
    """

    groups: Sequence[RunGroup]
    branches: Sequence[RunGroup]
    comparisons: Sequence[MetricComparison]
    max_step: int
    figures: Sequence[RenderedFigure]
    created_at: datetime
    paired: Sequence[PairedComparison]

    @property
    def drawn(self) -> list[RunGroup]:
        """The groups and the branches."""
        return [*self.groups, *self.branches]

    @property
    def runs(self) -> list[RunSummary]:
        """All runs, in the order of their groups, and all branches."""
        return [run for group in self.drawn for run in group.runs]


def render_page(content: ReportContent) -> str:
    """Return the HTML of the whole page; text from the files of runs is escaped."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=format_number, duration=human_duration, utc=_format_time, json=partial(json.dumps, default=str)
    )
    environment.tests["nan"] = math.isnan
    figures = {figure.name: figure for figure in content.figures}
    evaluated = [(i, run) for i, group in enumerate(content.groups) for run in group.runs if run.evaluation_metrics]
    keys = dict.fromkeys(key for _, run in evaluated for key in run.evaluation_metrics)
    events, num_omitted_events = _shown_events(content.runs)
    rules = {f"{prefix}…": description for prefix, (_, _, description) in SUMMARY_RULES.items()}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        content=content,
        title=", ".join(group.title for group in content.groups),
        version=__version__,
        colors=COLORS,
        sections=_sections(content, figures, bool(evaluated)),
        figures=figures,
        best_validation=BEST,
        marked_events=_count_marked_events,
        better_direction=better_direction,
        settings_differences=config_differences(content.groups),
        environment_differences=environment_differences(content.groups),
        evaluated=evaluated,
        evaluation_keys=[key for key in keys if not is_metric_baseline(key)],
        evaluation_baseline_keys=[key for key in keys if is_metric_baseline(key)],
        max_texts=_MAX_TEXTS,
        events=events,
        num_omitted_events=num_omitted_events,
        confidence=CONFIDENCE,
        method=SEEDS_METHOD,
        rules=rules | {BEST: BEST_RULE, f"{EVALUATION}…": EVALUATION_RULE},
    )


def _sections(content: ReportContent, figures: dict[str, RenderedFigure], is_evaluated: bool) -> dict[str, str]:
    """Return the headings of the sections that the page has, by id."""
    is_comparison = len(content.groups) > 1
    sections: dict[str, str] = {
        "runs": "Runs",
        "comparison": "Comparison" if is_comparison else "",
        "paired": "Paired differences" if content.paired else "",
        "differences": "What differs" if is_comparison else "",
        "loss": "Loss",
        "quality": "Quality" if is_evaluated or "quality" in figures else "",
        **{name: figures[name].title for name in ("speed", "memory", "optimizer") if name in figures},
        "events": "Events",
        "method": "How these numbers are computed",
    }
    return {name: heading for name, heading in sections.items() if heading}


def _count_marked_events(run: RunSummary) -> Counter[str]:
    return Counter(EVENT_MARKERS[event.kind][2] for event in run.events if event.kind in EVENT_MARKERS)


def _shown_events(runs: Sequence[RunSummary]) -> tuple[list[tuple[RunSummary, Event]], int]:
    """Return the last events of each kind and run, in order of time, and the number of earlier ones."""
    shown: list[tuple[RunSummary, Event]] = []
    for run in runs:
        for kind in dict.fromkeys(event.kind for event in run.events):
            shown += [(run, event) for event in run.events if event.kind == kind][-_MAX_EVENTS:]
    return sorted(shown, key=lambda row: row[1].time), sum(len(run.events) for run in runs) - len(shown)


def _format_time(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"
