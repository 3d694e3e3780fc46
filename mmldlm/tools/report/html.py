"""The HTML page of a report: one self-contained file without scripts or external resources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from mmldlm import __version__
from mmldlm.tools.report.comparison import MetricComparison, RunGroup, config_differences, environment_differences
from mmldlm.tools.report.css import STYLE
from mmldlm.tools.report.figures import COLORS, EVENT_MARKERS, RenderedFigure
from mmldlm.tools.report.ratio_interval import CONFIDENCE, METHOD, RatioEstimate, SeedStats
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
from mmldlm.utils.format import human_duration

# The browser refuses scripts and external resources, whatever the files of a run have injected into the page.
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_EVENTS = 20  # per kind and run
_MAX_TEXTS = 8


@dataclass(frozen=True)
class ReportContent:
    """All data of a report.

    Attributes:
        groups: Groups of runs, the baseline first.
        comparisons: Metrics that the baseline shares with other groups, up to `max_step`.
        max_step: Last step that enters the comparison.
        figures: Rendered figures, in the order of the page.
        created_at: Creation time, in UTC.
    """

    groups: Sequence[RunGroup]
    comparisons: Sequence[MetricComparison]
    max_step: int
    figures: Sequence[RenderedFigure]
    created_at: datetime

    @property
    def runs(self) -> list[RunSummary]:
        """All runs, in the order of their groups."""
        return [run for group in self.groups for run in group.runs]


def render_page(content: ReportContent) -> str:
    """Return the HTML of the whole page."""
    figures = {figure.name: figure for figure in content.figures}
    quality = "".join([_figure(figures["quality"]) if "quality" in figures else "", _evaluation(content.groups)])
    sections = [
        ("runs", "Runs", _runs(content)),
        ("comparison", "Comparison", _comparison(content) if len(content.groups) > 1 else ""),
        ("differences", "What differs", _differences(content.groups) if len(content.groups) > 1 else ""),
        ("loss", "Loss", _figure(figures["loss"]) if "loss" in figures else "<p>No training record yet.</p>"),
        ("quality", "Quality", quality),
        *(
            (name, figures[name].title, _figure(figures[name]))
            for name in ("speed", "memory", "optimizer")
            if name in figures
        ),
        ("events", "Events", _events(content.runs)),
        ("method", "How these numbers are computed", _method(content)),
    ]
    nonempty = [(name, title, body) for name, title, body in sections if body]
    links = " ".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in nonempty)
    bodies = "\n".join(
        f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}\n</section>' for name, title, body in nonempty
    )
    title = escape(", ".join(group.title for group in content.groups))
    created = f"{content.created_at:%Y-%m-%d %H:%M} UTC, mmldlm {__version__}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{title}</h1>\n<p class="soft">Report of {created}</p>\n<nav>{links}</nav>\n{bodies}\n</body>\n</html>\n'
    )


# --- sections ---------------------------------------------------------------------------------------------------


def _runs(content: ReportContent) -> str:
    head = ["run", "state", "step", "seed", "training", "tokens", "loss", "validation", "best validation", "events"]
    rows = []
    for index, group in enumerate(content.groups):
        for run in group.runs:
            values, total = run.final_values(), run.history.total_steps
            counts = Counter(event.kind for event in run.events if event.kind in EVENT_MARKERS)
            events = ", ".join(f"{count} × {EVENT_MARKERS[kind][2]}" for kind, count in counts.items())
            rows.append(
                [
                    f"{_swatch(index)}{escape(run.name)}<br><small>{escape(str(run.path))}</small>",
                    f'<span class="state {run.state.name}">{run.state.name}</span>'
                    f'<small class="cause">{escape(run.state.cause if run.state.name != "finished" else "")}</small>',
                    f"{run.history.step:,}" + (f" of {total:,}" if isinstance(total, int) else ""),
                    escape(str(run.seed if run.seed is not None else "unknown")),
                    human_duration(run.duration_s),
                    *(
                        format_number(values.get(key))
                        for key in ("data/tokens", "loss/total", "validation/total", BEST)
                    ),
                    escape(events),
                ]
            )
    note = ""
    if damaged := sum(run.history.damaged for run in content.runs):
        note = f"<p>{damaged} damaged lines of metrics.jsonl are ignored.</p>"
    return _table(head, rows, numbers=range(2, 9)) + note


def _comparison(content: ReportContent) -> str:
    baseline, *others = content.groups
    head = ["metric", f"{_swatch(0)}{escape(baseline.title)}<br><small>baseline, n = {baseline.num_seeds}</small>"]
    for index, group in enumerate(others, start=1):
        head += [f"{_swatch(index)}{escape(group.title)}<br><small>n = {group.num_seeds}</small>", "ratio"]
    rows = []
    for comparison in content.comparisons:
        key = comparison.key
        cells = [f"<code>{escape(key)}</code>{_arrow(key)}", _seed_stats(comparison.baseline, baseline)]
        for group in others:
            if group.name not in comparison.others:
                cells += ["–", "–"]
                continue
            stats, ratio = comparison.others[group.name]
            cells += [_seed_stats(stats, group), _ratio(ratio, comparison.verdict(group.name))]
        rows.append(cells)
    about = (
        f"Over steps 1 to {content.max_step:,}, which all of these runs have reached. A ratio is the group's mean over "
        f"the baseline's, with its {CONFIDENCE:.0%} interval; it is called better or worse where that interval lies on "
        "one side of 1. n counts seeds: with one seed there is no interval."
    )
    return f"<p>{about}</p>" + _table(head, rows, numbers=range(1, len(head)), raw_head=True)


def _differences(groups: Sequence[RunGroup]) -> str:
    settings, environment = config_differences(groups), environment_differences(groups)
    if not settings and not environment:
        return "<p>Nothing: the same settings, engine, processes, versions and data.</p>"
    head = ["setting", *(f"{_swatch(i)}{escape(group.title)}" for i, group in enumerate(groups))]
    rows = [[f"<code>{escape(key)}</code>", *map(_value, row)] for key, row in settings.items()]
    rows += [
        [f"<small>start-up:</small> <code>{escape(key)}</code>", *map(_value, row)] for key, row in environment.items()
    ]
    unknown = [run.name for group in groups for run in group.runs if not run.config]
    note = f"<p>No readable config.yaml: {escape(', '.join(unknown))}</p>" if unknown else ""
    return _table(head, rows, raw_head=True) + note


def _figure(figure: RenderedFigure) -> str:
    omitted = f" Not drawn: {', '.join(figure.omitted_panels)}." if figure.omitted_panels else ""
    caption = f'<p class="soft">{escape(figure.caption + omitted)}</p>' if figure.caption or omitted else ""
    return f'{caption}<figure role="img" aria-label="{escape(figure.title)}">{figure.svg}</figure>'


def _evaluation(groups: Sequence[RunGroup]) -> str:
    runs = [(index, run) for index, group in enumerate(groups) for run in group.runs if run.evaluation_metrics]
    if not runs:
        return ""
    keys = dict.fromkeys(key for _, run in runs for key in run.evaluation_metrics)
    head = ["evaluation", *(f"{_swatch(index)}{escape(run.name)}" for index, run in runs)]
    settings = [
        f"<small>{escape(', '.join(f'{key} {value}' for key, value in run.evaluation_settings.items()))}</small>"
        for _, run in runs
    ]

    def table(selected_keys: Iterable[str]) -> str:
        rows = [
            [
                f"<code>{escape(key.removeprefix(EVALUATION))}</code>",
                *(format_number(run.evaluation_metrics.get(key)) for _, run in runs),
            ]
            for key in selected_keys
        ]
        return _table(head, [["<small>settings</small>", *settings], *rows], numbers=range(1, len(head)), raw_head=True)

    baselines = [key for key in keys if is_metric_baseline(key)]
    folded = f"<details><summary>Metric baselines</summary>{table(baselines)}</details>" if baselines else ""
    return table(key for key in keys if key not in baselines) + folded + "".join(_texts(run) for _, run in runs)


def _texts(run: RunSummary) -> str:
    """Return a table of a few held-out texts next to the texts generated from their latents."""
    samples = [sample for sample in run.generated_texts if isinstance(sample, Mapping)][:_MAX_TEXTS]
    if not samples:
        return ""
    head = list(dict.fromkeys(str(key) for sample in samples for key in sample))
    rows = [[escape(str(sample.get(key, ""))) for key in head] for sample in samples]
    return (
        f"<details><summary>Texts of {escape(run.name)}</summary>{_table(head, rows, text=range(len(head)))}</details>"
    )


def _events(runs: Sequence[RunSummary]) -> str:
    rows: list[tuple[float, list[str]]] = []
    num_omitted = 0
    for run in runs:
        shown_events: list[Event] = []
        for kind in dict.fromkeys(event.kind for event in run.events):
            same_kind = [event for event in run.events if event.kind == kind]
            shown_events += same_kind[-_MAX_EVENTS:]
            num_omitted += max(0, len(same_kind) - _MAX_EVENTS)
        for event in shown_events:
            kind_cell = event.kind.replace("_", "-")
            kind_cell = f'<span class="worse">{kind_cell}</span>' if event.kind == "failure" else kind_cell
            cells = [_timestamp(event.time), escape(run.name), f"{event.step:,}", kind_cell, escape(event.text)]
            rows.append((event.time, cells))
    rows.sort(key=lambda row: row[0])
    note = f"<p>{num_omitted} earlier events are omitted; metrics.jsonl has them.</p>" if num_omitted else ""
    return note + _table(
        ["time (UTC)", "run", "step", "event", ""], [cells for _, cells in rows], numbers=[2], text=[4]
    )


def _method(content: ReportContent) -> str:
    rules = {f"{prefix}…": description for prefix, (_, _, description) in SUMMARY_RULES.items()}
    rules |= {BEST: BEST_RULE, f"{EVALUATION}…": EVALUATION_RULE}
    rows = [[f"<code>{escape(key)}</code>", escape(description)] for key, description in rules.items()]
    about = (
        "Runs whose configs differ only in run.seed and run.dir form one group. Runs of equal seed are not independent "
        f"samples: their values are averaged first, and n counts seeds. The interval is the {METHOD}. "
        "It covers the spread over seeds, with which initial weights, sample order and noise change."
    )
    files = ", ".join(f"{figure.name}.png" for figure in content.figures)
    return (
        f"<p>{escape(about)}</p>{_table(['value', 'computed as'], rows)}"
        f"<p>Stored next to this page: final_metrics.json{escape(', ' + files if files else '')}.</p>"
    )


# --- pieces -----------------------------------------------------------------------------------------------------


def format_number(value: float | None) -> str:
    """Return `value` with four significant digits, or a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _seed_stats(stats: SeedStats, group: RunGroup) -> str:
    spread = f" <small>± {stats.std:.2g}</small>" if stats.std is not None else ""
    fewer_seeds = f" <small>(n = {stats.n})</small>" if stats.n < group.num_seeds else ""
    return f"{format_number(stats.mean)}{spread}{fewer_seeds}"


def _ratio(ratio: RatioEstimate, verdict: str) -> str:
    value = "–" if ratio.value is None else f"{ratio.value:.3f}"
    if ratio.interval is None:
        return f"{value} <small>({escape(ratio.no_interval_reason)})</small>"
    low, high = ratio.interval
    verdict_cell = f' <span class="{verdict}">{verdict}</span>' if verdict else ""
    return f"{value} <small>[{low:.3f}, {high:.3f}]</small>{verdict_cell}"


def _arrow(key: str) -> str:
    direction = better_direction(key)
    arrow = "↑" if direction == "higher" else "↓"
    return f' <small title="{direction} is better">{arrow}</small>' if direction else ""


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background: var(--run{index % len(COLORS)})"></i>'


def _value(value: Any) -> str:
    return f"<code>{escape(value if isinstance(value, str) else json.dumps(value, default=str))}</code>"


def _timestamp(time: float) -> str:
    try:
        return f"{datetime.fromtimestamp(time, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Iterable[int] = (),
    text: Iterable[int] = (),
    raw_head: bool = False,
) -> str:
    """Return an HTML table.

    Args:
        head: Column titles, escaped here unless `raw_head`.
        rows: Cells, which are HTML already.
        numbers: Indices of columns that are aligned right.
        text: Indices of columns that hold long text.
        raw_head: `head` is HTML already.
    """
    classes = dict.fromkeys(text, ' class="text"') | dict.fromkeys(numbers, ' class="number"')
    heads = "".join(f"<th{classes.get(i, '')}>{c if raw_head else escape(c)}</th>" for i, c in enumerate(head))
    lines = ("".join(f"<td{classes.get(i, '')}>{c}</td>" for i, c in enumerate(row)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
