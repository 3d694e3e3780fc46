"""`mmldlm report RUN [RUN ...]`: what runs did, in one HTML file, as pictures, and as `final_metrics.json`.

It reads the folders of runs alone, whatever state they are in, and needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm import __version__
from mmldlm.errors import ExitCode, StorageError
from mmldlm.tools.report.comparison import Group, Row, common_step, compare, config_differences, grouped
from mmldlm.tools.report.figures import draw, require_matplotlib
from mmldlm.tools.report.html import Content, number, render
from mmldlm.tools.report.ratio_interval import CONFIDENCE, METHOD, Ratio, Sample
from mmldlm.tools.report.run_summary import Run, better
from mmldlm.utils.files import write_atomically

PAGE, METRICS = "report.html", "final_metrics.json"


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Each run once, by the name of its folder; those of equal names by their paths as given."""
    unique = {path.resolve(): path for path in reversed(paths)}
    runs = [Run(path) for path in reversed(unique.values())]
    known = Counter(run.name for run in runs)
    for run in runs:
        if known[run.name] > 1:
            run.name = str(run.path)
    return runs


def final_metrics(content: Content) -> dict[str, Any]:
    """The report for machines; docs/review.md says what each key is."""
    baseline = content.groups[0]
    return {
        "made_at": content.made_at.isoformat(timespec="seconds"),
        "mmldlm": __version__,
        "baseline": baseline.name,
        "compared_to_step": content.until,
        "confidence": CONFIDENCE,
        "method": METHOD,
        "runs": {run.name: _run(run, group) for group in content.groups for run in group.runs},
        "groups": {group.name: [run.name for run in group.runs] for group in content.groups},
        "comparison": [_comparison(row, name) for row in content.rows for name in row.others],
        "config_differences": {
            key: dict(zip((group.name for group in content.groups), values, strict=True))
            for key, values in config_differences(content.groups).items()
        },
    }


def _run(run: Run, group: Group) -> dict[str, Any]:
    state = run.state
    return {
        "path": str(run.path.resolve()),
        "group": group.name,
        "seed": run.seed,
        "state": state.name,
        "exit_code": state.code,
        "cause": state.cause,
        "step": run.history.step,
        "total_steps": run.history.total_steps,
        "seconds": round(run.seconds, 3),
        "events": dict(Counter(event.kind for event in run.events)),
        "metrics": {**run.values(), **run.evaluation},
        "evaluated": run.evaluated,
    }


def _comparison(row: Row, name: str) -> dict[str, Any]:
    sample, found = row.others[name]
    return {
        "metric": row.key,
        "better": better(row.key),
        "group": name,
        "baseline": _sample(row.baseline),
        "value": _sample(sample),
        "ratio": found.value,
        "interval": found.interval,
        "why_no_interval": found.why,
        "verdict": row.verdict(name),
    }


def _sample(sample: Sample) -> dict[str, Any]:
    return {"mean": sample.mean, "standard_deviation": sample.deviation, "n": sample.n}


def _as_json(values: Any) -> str:
    """What a run's files hold may be neither a number nor text of JSON."""
    plain = json.loads(json.dumps(values, default=str), parse_constant=lambda _: None)  # NaN and Infinity
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def report(paths: Sequence[Path], baseline: Path | None, out: Path) -> Content:
    """Write the report of the runs in `paths` into the folder `out`."""
    runs = read_runs([*paths, *([baseline] if baseline else [])])
    first = next(run for run in runs if run.path.resolve() == (baseline or paths[0]).resolve())
    groups = grouped(runs, first)
    until = common_step(groups)
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawings = draw(groups, out)
        content = Content(groups, compare(groups, until), until, drawings, datetime.now(timezone.utc))
        write_atomically(out / METRICS, _as_json(final_metrics(content)))
        write_atomically(out / PAGE, render(content))
    except OSError as error:
        raise StorageError(f"--out: cannot write {error.filename or out}: {error.strerror}") from error
    return content


def summary_lines(content: Content) -> list[str]:
    """For a terminal."""
    width = max(len(run.name) for run in content.runs)
    lines = []
    for run in content.runs:
        values, total = run.values(), run.history.total_steps
        shown = [f"{key} {number(values[key])}" for key in ("loss/total", "validation/total") if key in values]
        place = f"step {run.history.step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
        lines.append("  ".join([f"{run.name:<{width}}", f"{run.state.name:<8}", place, *shown]))
    for row in content.rows:
        if row.key in ("validation/total", "speed/tokens_per_s"):
            lines += [
                f"{row.key} of {name}: {_shown(found)} of {content.groups[0].name}'s"
                for name, (_, found) in row.others.items()
            ]
    return lines


def _shown(found: Ratio) -> str:
    if found.value is None or found.interval is None:
        return f"{number(found.value)} times ({found.why})"
    return f"{found.value:.4f} times [{found.interval[0]:.4f}, {found.interval[1]:.4f}]"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mmldlm report",
        description="Runs in one self-contained HTML file, PNGs and final_metrics.json. They may be going on.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN", help="what the others are compared with; default: the first"
    )
    parser.add_argument("--out", type=Path, help="folder to write into; default: report in the folder of the first run")
    options = parser.parse_args(argv)
    require_matplotlib()
    out = options.out or options.runs[0] / "report"
    content = report(options.runs, options.baseline, out)
    print("\n".join(summary_lines(content)))
    print(f"written: {out / PAGE}, {out / METRICS}, {len(content.drawings)} PNG files")
    return ExitCode.DONE
