"""The page of a report: one HTML file that needs nothing else and lets nothing in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from typing import Any

from mmldlm import __version__
from mmldlm.tools.report.comparison import Group, Row, config_differences, surroundings_differences
from mmldlm.tools.report.css import STYLE
from mmldlm.tools.report.figures import COLORS, MARKS, Drawing
from mmldlm.tools.report.ratio_interval import CONFIDENCE, METHOD, Ratio, Sample
from mmldlm.tools.report.run_summary import (
    BEST,
    BEST_RULE,
    EVALUATION,
    EVALUATION_RULE,
    RULES,
    Event,
    Run,
    better,
    is_control,
)
from mmldlm.utils.format import human_duration

# No script, and nothing from anywhere: a browser enforces it, whatever a run's files have put in here.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_EVENTS = 20  # of one kind of one run
_MOST_TEXTS = 8


@dataclass(frozen=True)
class Content:
    """All that a report shows."""

    groups: Sequence[Group]
    rows: Sequence[Row]
    until: int  # the step up to which `rows` compare
    drawings: Sequence[Drawing]
    made_at: datetime

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def render(content: Content) -> str:
    """The whole file."""
    of = {drawing.name: drawing for drawing in content.drawings}
    quality = "".join([_figure(of["quality"]) if "quality" in of else "", _evaluation(content.groups)])
    sections = [
        ("runs", "Runs", _runs(content)),
        ("comparison", "Comparison", _comparison(content) if len(content.groups) > 1 else ""),
        ("differences", "What differs", _differences(content.groups) if len(content.groups) > 1 else ""),
        ("loss", "Loss", _figure(of["loss"]) if "loss" in of else "<p>No training record yet.</p>"),
        ("quality", "Quality", quality),
        *((name, of[name].title, _figure(of[name])) for name in ("speed", "memory", "optimizer") if name in of),
        ("events", "Events", _events(content.runs)),
        ("method", "How these numbers are made", _method(content)),
    ]
    shown = [(name, title, body) for name, title, body in sections if body]
    links = " ".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in shown)
    bodies = "\n".join(f'<section id="{n}">\n<h2>{escape(title)}</h2>\n{body}\n</section>' for n, title, body in shown)
    title = escape(", ".join(group.title for group in content.groups))
    made = f"{content.made_at:%Y-%m-%d %H:%M} UTC, mmldlm {__version__}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Report: {title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{title}</h1>\n<p class="soft">Report of {made}</p>\n<nav>{links}</nav>\n{bodies}\n</body>\n</html>\n'
    )


# --- sections ---------------------------------------------------------------------------------------------------


def _runs(content: Content) -> str:
    head = ["run", "state", "step", "seed", "training", "tokens", "loss", "validation", "best validation", "events"]
    rows = []
    for index, group in enumerate(content.groups):
        for run in group.runs:
            values, total = run.values(), run.history.total_steps
            counts = Counter(event.kind for event in run.events if event.kind in MARKS)
            told = ", ".join(f"{count} × {MARKS[kind][2]}" for kind, count in counts.items())
            rows.append(
                [
                    f"{_swatch(index)}{escape(run.name)}<br><small>{escape(str(run.path))}</small>",
                    f'<span class="state {run.state.name}">{run.state.name}</span>'
                    f'<small class="cause">{escape(run.state.cause if run.state.name != "finished" else "")}</small>',
                    f"{run.history.step:,}" + (f" of {total:,}" if isinstance(total, int) else ""),
                    escape(str(run.seed if run.seed is not None else "unknown")),
                    human_duration(run.seconds),
                    *(number(values.get(key)) for key in ("data/tokens", "loss/total", "validation/total", BEST)),
                    escape(told),
                ]
            )
    note = ""
    if damaged := sum(run.history.damaged for run in content.runs):
        note = f"<p>{damaged} damaged lines of metrics.jsonl are left out.</p>"
    return _table(head, rows, numbers=range(2, 9)) + note


def _comparison(content: Content) -> str:
    baseline, *others = content.groups
    head = ["metric", f"{_swatch(0)}{escape(baseline.title)}<br><small>baseline, n = {baseline.seeds}</small>"]
    for index, group in enumerate(others, start=1):
        head += [f"{_swatch(index)}{escape(group.title)}<br><small>n = {group.seeds}</small>", "ratio"]
    rows = []
    for row in content.rows:
        cells = [f"<code>{escape(row.key)}</code>{_arrow(row.key)}", _sample(row.baseline, baseline)]
        for group in others:
            if group.name not in row.others:
                cells += ["–", "–"]
                continue
            sample, found = row.others[group.name]
            cells += [_sample(sample, group), _ratio(found, row.verdict(group.name))]
        rows.append(cells)
    about = (
        f"Over steps 1 to {content.until:,}, which all of these runs have reached. A ratio is the group's mean over "
        f"the baseline's, with its {CONFIDENCE:.0%} interval; it is called better or worse where that interval lies on "
        "one side of 1. n counts seeds: with one seed there is no interval."
    )
    return f"<p>{about}</p>" + _table(head, rows, numbers=range(1, len(head)), raw_head=True)


def _differences(groups: Sequence[Group]) -> str:
    settings, around = config_differences(groups), surroundings_differences(groups)
    if not settings and not around:
        return "<p>Nothing: neither settings nor engine, processes, versions and data.</p>"
    head = ["setting", *(f"{_swatch(i)}{escape(group.title)}" for i, group in enumerate(groups))]
    rows = [[f"<code>{escape(key)}</code>", *map(_value, row)] for key, row in settings.items()]
    rows += [[f"<small>start-up:</small> <code>{escape(k)}</code>", *map(_value, row)] for k, row in around.items()]
    unknown = [run.name for group in groups for run in group.runs if not run.config]
    note = f"<p>No config.yaml to be read: {escape(', '.join(unknown))}</p>" if unknown else ""
    return _table(head, rows, raw_head=True) + note


def _figure(drawing: Drawing) -> str:
    left_out = f" Not drawn: {', '.join(drawing.left_out)}." if drawing.left_out else ""
    about = f'<p class="soft">{escape(drawing.about + left_out)}</p>' if drawing.about or left_out else ""
    return f'{about}<figure role="img" aria-label="{escape(drawing.title)}">{drawing.svg}</figure>'


def _evaluation(groups: Sequence[Group]) -> str:
    runs = [(index, run) for index, group in enumerate(groups) for run in group.runs if run.evaluation]
    if not runs:
        return ""
    keys = dict.fromkeys(key for _, run in runs for key in run.evaluation)
    head = ["evaluation", *(f"{_swatch(index)}{escape(run.name)}" for index, run in runs)]
    how = [f"<small>{escape(', '.join(f'{k} {v}' for k, v in run.evaluated.items()))}</small>" for _, run in runs]

    def table(chosen: Iterable[str]) -> str:
        rows = [
            [
                f"<code>{escape(key.removeprefix(EVALUATION))}</code>",
                *(number(run.evaluation.get(key)) for _, run in runs),
            ]
            for key in chosen
        ]
        return _table(head, [["<small>how</small>", *how], *rows], numbers=range(1, len(head)), raw_head=True)

    controls = [key for key in keys if is_control(key)]
    folded = f"<details><summary>Controls</summary>{table(controls)}</details>" if controls else ""
    return table(key for key in keys if key not in controls) + folded + "".join(_texts(run) for _, run in runs)


def _texts(run: Run) -> str:
    """A few texts beside what was written from their latents."""
    texts = [pair for pair in run.texts if isinstance(pair, Mapping)][:_MOST_TEXTS]
    if not texts:
        return ""
    head = list(dict.fromkeys(str(key) for pair in texts for key in pair))
    rows = [[escape(str(pair.get(key, ""))) for key in head] for pair in texts]
    return (
        f"<details><summary>Texts of {escape(run.name)}</summary>{_table(head, rows, text=range(len(head)))}</details>"
    )


def _events(runs: Sequence[Run]) -> str:
    rows: list[tuple[float, list[str]]] = []
    left_out = 0
    for run in runs:
        kept: list[Event] = []
        for kind in dict.fromkeys(event.kind for event in run.events):
            of_kind = [event for event in run.events if event.kind == kind]
            kept += of_kind[-_MOST_EVENTS:]
            left_out += max(0, len(of_kind) - _MOST_EVENTS)
        for event in kept:
            word = event.kind.replace("_", "-")
            word = f'<span class="worse">{word}</span>' if event.kind == "failure" else word
            cells = [_when(event.time), escape(run.name), f"{event.step:,}", word, escape(event.text)]
            rows.append((event.time, cells))
    rows.sort(key=lambda row: row[0])
    note = f"<p>{left_out} earlier ones are left out; metrics.jsonl has them.</p>" if left_out else ""
    return note + _table(
        ["time (UTC)", "run", "step", "event", ""], [cells for _, cells in rows], numbers=[2], text=[4]
    )


def _method(content: Content) -> str:
    rules = {f"{group}…": words for group, (_, _, words) in RULES.items()}
    rules |= {BEST: BEST_RULE, f"{EVALUATION}…": EVALUATION_RULE}
    rows = [[f"<code>{escape(key)}</code>", escape(words)] for key, words in rules.items()]
    about = (
        "Runs whose configs differ in run.seed and run.dir alone are one group. Runs of equal seed are no independent "
        f"samples: their values are averaged first, and n counts seeds. The interval is the {METHOD}. "
        "It holds the spread over seeds, with which initial weights, order of samples and noise change."
    )
    files = ", ".join(f"{drawing.name}.png" for drawing in content.drawings)
    return (
        f"<p>{escape(about)}</p>{_table(['value', 'stands for'], rows)}"
        f"<p>Beside this page: final_metrics.json{escape(', ' + files if files else '')}.</p>"
    )


# --- pieces -----------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Four digits, or a dash."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _sample(sample: Sample, group: Group) -> str:
    spread = f" <small>± {sample.deviation:.2g}</small>" if sample.deviation is not None else ""
    fewer = f" <small>(n = {sample.n})</small>" if sample.n < group.seeds else ""
    return f"{number(sample.mean)}{spread}{fewer}"


def _ratio(found: Ratio, verdict: str) -> str:
    shown = "–" if found.value is None else f"{found.value:.3f}"
    if found.interval is None:
        return f"{shown} <small>({escape(found.why)})</small>"
    low, high = found.interval
    word = f' <span class="{verdict}">{verdict}</span>' if verdict else ""
    return f"{shown} <small>[{low:.3f}, {high:.3f}]</small>{word}"


def _arrow(key: str) -> str:
    word = better(key)
    return f' <small title="{word} is better">{"↑" if word == "higher" else "↓"}</small>' if word else ""


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background: var(--run{index % len(COLORS)})"></i>'


def _value(value: Any) -> str:
    return f"<code>{escape(value if isinstance(value, str) else json.dumps(value, default=str))}</code>"


def _when(time: float) -> str:
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
    """A table of cells that are HTML already; `numbers` and `text` are columns."""
    kinds = dict.fromkeys(text, ' class="text"') | dict.fromkeys(numbers, ' class="number"')
    heads = "".join(f"<th{kinds.get(i, '')}>{c if raw_head else escape(c)}</th>" for i, c in enumerate(head))
    lines = ("".join(f"<td{kinds.get(i, '')}>{c}</td>" for i, c in enumerate(row)) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
