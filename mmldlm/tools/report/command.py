"""`mmldlm report RUN [RUN ...]`: summarize runs in one HTML file, PNG figures and `final_metrics.json`.

It reads only run folders, whatever state the runs are in, and needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm import __version__
from mmldlm.errors import ExitCode, StorageError, UsageError
from mmldlm.tools.report.comparison import (
    MetricComparison,
    RunGroup,
    common_step,
    compare_groups,
    config_differences,
    group_runs,
)
from mmldlm.tools.report.figures import draw_figures
from mmldlm.tools.report.html import ReportContent, render_page
from mmldlm.tools.report.paired import PairedComparison
from mmldlm.tools.report.run_summary import RunSummary, better_direction
from mmldlm.tools.runs import RunState
from mmldlm.utils.files import write_atomically
from mmldlm.utils.format import format_number
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress
from mmldlm.utils.ratio import CONFIDENCE, SEEDS_METHOD, Ratio, SeedStats

PAGE, METRICS = "report.html", "final_metrics.json"


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
    baseline = content.groups[0]
    return {
        "made_at": content.created_at.isoformat(timespec="seconds"),
        "mmldlm": __version__,
        "baseline": baseline.name,
        "compared_to_step": content.max_step,
        "confidence": CONFIDENCE,
        "method": SEEDS_METHOD,
        "runs": {run.name: _run(run, group) for group in content.drawn for run in group.runs},
        "groups": {group.name: [run.name for run in group.runs] for group in content.groups},
        "comparison": [
            _comparison(comparison, name) for comparison in content.comparisons for name in comparison.others
        ],
        "paired": [comparison.to_dict() for comparison in content.paired],
        "config_differences": {
            key: dict(zip((group.name for group in content.groups), values, strict=True))
            for key, values in config_differences(content.groups).items()
        },
    }


def _run(run: RunSummary, group: RunGroup) -> dict[str, Any]:
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
        "seconds": round(run.duration_s, 3),
        "events": dict(Counter(event.kind for event in run.events)),
        "metrics": {**run.final_values(), **run.evaluation_metrics},
        "evaluated": run.evaluation_settings,
    }


def _comparison(comparison: MetricComparison, name: str) -> dict[str, Any]:
    stats, ratio = comparison.others[name]
    return {
        "metric": comparison.key,
        "better": better_direction(comparison.key),
        "group": name,
        "baseline": _seed_stats(comparison.baseline),
        "value": _seed_stats(stats),
        "ratio": ratio.value,
        "interval": None if ratio.no_interval_reason else ratio.interval,
        "why_no_interval": ratio.no_interval_reason,
        "significance": comparison.significance(name),
    }


def _seed_stats(stats: SeedStats) -> dict[str, Any]:
    return {"mean": stats.mean, "standard_deviation": stats.std, "n": stats.n}


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
    groups = group_runs(runs, first)
    max_step = common_step(groups)
    try:
        out.mkdir(parents=True, exist_ok=True)
        paired = [each for group in groups[1:] if (each := PairedComparison.of_groups(groups[0], group)).pairs]
        figures = draw_figures([*groups, *branches], paired, out)
        comparisons, now = compare_groups(groups, max_step), datetime.now(timezone.utc)
        content = ReportContent(groups, branches, comparisons, max_step, figures, now, paired)
        # Values from a run's files may be of types that JSON lacks.
        metrics = json.dumps(replace_nonfinite(final_metrics(content)), indent=1, allow_nan=False, default=str)
        write_atomically(out / METRICS, f"{metrics}\n")
        write_atomically(out / PAGE, render_page(content))
    except OSError as error:
        raise StorageError(f"--out: cannot write {error.filename or out}: {error.strerror}") from error
    return content


def summary_lines(content: ReportContent) -> list[str]:
    """Return a short summary for the terminal: a line per run, and the ratios of validation loss and speed."""
    width = max(len(printable(run.name)) for run in content.runs)
    lines = []
    for run in content.runs:
        values, total = run.final_values(), run.history.total_steps
        losses = [f"{key} {format_number(values[key])}" for key in ("loss/total", "validation/total") if key in values]
        progress = f"step {run.history.step:,}" + (f" of {total:,}" if total else "")
        lines.append("  ".join([f"{printable(run.name):<{width}}", f"{run.state.name:<8}", progress, *losses]))
    for comparison in content.comparisons:
        if comparison.key in ("validation/total", "speed/tokens_per_s"):
            lines += [
                printable(f"{comparison.key} of {name}: {_format_ratio(ratio)} of {content.groups[0].name}'s")
                for name, (_, ratio) in comparison.others.items()
            ]
    return lines


def _format_ratio(ratio: Ratio) -> str:
    if math.isnan(ratio.value):
        return f"no ratio ({ratio.no_interval_reason})"
    if ratio.no_interval_reason:
        return f"{format_number(ratio.value)} times ({ratio.no_interval_reason})"
    return f"{ratio.value:.4f} times [{ratio.interval[0]:.4f}, {ratio.interval[1]:.4f}]"


def _require_libraries() -> None:
    """Raise UsageError if a library of the extra `report` that every report needs is not installed."""
    for name in ("matplotlib", "jinja2"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UsageError(f"the report needs {name}: pip install mmldlm[report]") from None


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
    _require_libraries()
    out = options.out or options.runs[0] / "report"
    with Progress() as progress:
        progress.phase("reading the runs and drawing figures", announce=False)
        content = report(options.runs, options.baseline, out)
    print("\n".join(summary_lines(content)))
    print(f"written: {out / PAGE}, {out / METRICS}, {len(content.figures)} PNG files")
    return ExitCode.DONE
