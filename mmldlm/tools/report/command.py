"""`mmldlm report RUN [RUN ...]`: summarize runs in one HTML file, PNG figures and `final_metrics.json`.

It reads only run folders, whatever state the runs are in, and needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm import __version__
from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.report.comparison import Comparison, RunGroup, common_step, group_runs, setting_differences
from mmldlm.tools.report.figures import draw_figures
from mmldlm.tools.report.html import ReportContent, render_page
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.tools.runs import RunState
from mmldlm.utils.files import naming, write_atomically
from mmldlm.utils.format import format_number
from mmldlm.utils.intervals import CONFIDENCE
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress
from mmldlm.utils.versions import install_command

PAGE, METRICS = "report.html", "final_metrics.json"
_PRINTED_METRICS = ("loss/total", "validation/total", "speed/tokens_per_s")  # of comparisons, in the terminal


def read_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Read each run once. A run is named after its folder; runs with equal folder names, by their paths as given."""
    # Of several paths to one folder, the one given first is kept.
    unique = {path.resolve(): path for path in reversed(paths)}
    runs = [RunSummary(path) for path in reversed(unique.values())]
    counts = Counter(run.name for run in runs)
    for run in runs:
        if counts[run.name] > 1:
            run.name = str(run.path)
    return runs


def final_metrics(content: ReportContent) -> dict[str, Any]:
    """Return the machine-readable report; docs/review.md defines the keys."""
    return {
        "made_at": content.created_at.isoformat(timespec="seconds"),
        "mmldlm": __version__,
        "baseline": content.groups[0].name,
        "compared_to_step": content.max_step,
        "confidence": CONFIDENCE,
        "runs": {
            run.name: {
                "path": str(run.path.resolve()),
                "group": group.name,
                "seed": run.history.config.get("run.seed"),
                "state": run.state.name,
                "exit_code": run.state.code,
                "cause": run.state.cause,
                "step": run.history.step,
                "total_steps": run.history.total_steps,
                "seconds": round(run.duration_s, 3),
                "events": dict(Counter(event.kind for event in run.events)),
                "metrics": {**run.final_values(), **run.evaluation_metrics},
                "evaluated": run.evaluation_settings,
            }
            for group in content.drawn
            for run in group.runs
        },
        "groups": {group.name: [run.name for run in group.runs] for group in content.groups},
        "comparison": {comparison.b.name: comparison.to_dict() for comparison in content.comparisons},
        "config_differences": {
            key: dict(zip((group.name for group in content.groups), values, strict=True))
            for key, values in setting_differences(content.groups).items()
        },
    }


def report(paths: Sequence[Path], baseline: Path | None, out: Path) -> ReportContent:
    """Write a report of run folders to the folder `out`, created if missing.

    They are compared with `baseline`, by default the first.
    """
    runs = read_runs([*paths, *([baseline] if baseline else [])])
    # What `mmldlm rewind` has set aside is no run that had the run's settings: it is drawn, and not compared.
    left = read_runs([branch for run in runs for branch in sorted(run.path.glob("branches/*"))])
    for run in left:
        run.state = RunState("stopped", cause="left by mmldlm rewind")
    branches = [RunGroup((run,)) for run in left]
    first = next(run for run in runs if run.path.resolve() == (baseline or paths[0]).resolve())
    a, *others = groups = group_runs(runs, first)
    max_step = common_step(groups)
    comparisons = [Comparison(a, b, len(a.runs) > 1 or len(b.runs) > 1, max_step) for b in others]
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        figures = draw_figures([*groups, *branches], comparisons, out)
        content = ReportContent(groups, branches, comparisons, max_step, figures, datetime.now(timezone.utc))
        # Values from a run's files may be of types that JSON lacks.
        metrics = json.dumps(replace_nonfinite(final_metrics(content)), indent=1, allow_nan=False, default=str)
        write_atomically(out / METRICS, f"{metrics}\n")
        write_atomically(out / PAGE, render_page(content, out))
    return content


def summary_lines(content: ReportContent) -> list[str]:
    """Return a short summary for the terminal: a line per run, and what it says of each group."""
    width = max(len(printable(run.name)) for run in content.runs)
    lines = []
    for run in content.runs:
        values, total = run.final_values(), run.history.total_steps
        losses = [f"{key} {format_number(values[key])}" for key in ("loss/total", "validation/total") if key in values]
        progress = f"step {run.history.step:,}" + (f" of {total:,}" if total else "")
        lines.append("  ".join([f"{printable(run.name):<{width}}", f"{run.state.name:<8}", progress, *losses]))
    for comparison in content.comparisons:
        lines.append(f"A {comparison.a.title}, B {comparison.b.title}: {comparison.conclusion}")
        lines += [f"    {one}" for one in comparison.over_seeds if one.tag in _PRINTED_METRICS]
    return [printable(line) for line in lines]


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm report`."""
    parser = argparse.ArgumentParser(
        prog="mmldlm report",
        description="Summarize runs, finished or not, in one self-contained HTML file, PNGs and final_metrics.json.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN", help="run to compare the others with; default: the first"
    )
    parser.add_argument("--out", type=Path, help="folder to write into; default: report in the folder of the first run")
    options = parser.parse_args(argv)
    for name in ("matplotlib", "jinja2"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UsageError(f"the report needs {name}: {install_command('report')}") from None
    out = options.out or options.runs[0] / "report"
    with Progress() as progress:
        progress.phase("reading the runs and drawing figures", announce=False)
        content = report(options.runs, options.baseline, out)
    print("\n".join(summary_lines(content)))
    print(f"written: {out / PAGE}, {out / METRICS}, {len(content.figures)} PNG files")
    return ExitCode.DONE
