"""`mmldlm report RUN [RUN ...]`: summarize runs in PNG figures, `final_metrics.json` and a few lines.

It reads only run folders, whatever state the runs are in, and needs neither torch nor a GPU.
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
from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.report.comparison import Comparison, RunGroup, common_step, group_runs, setting_differences
from mmldlm.tools.report.figures import draw_figures
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.tools.runs import RunState
from mmldlm.utils.files import naming, write_atomically
from mmldlm.utils.format import format_number
from mmldlm.utils.intervals import CONFIDENCE
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress
from mmldlm.utils.versions import install_command

METRICS = "final_metrics.json"
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


def final_metrics(
    groups: Sequence[RunGroup], branches: Sequence[RunGroup], comparisons: Sequence[Comparison], max_step: int
) -> dict[str, Any]:
    """Return the machine-readable report; docs/review.md defines the keys."""
    return {
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mmldlm": __version__,
        "baseline": groups[0].name,
        "compared_to_step": max_step,
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
                "events": dict(Counter(kind for kind, _ in run.events)),
                "metrics": {**run.final_values(), **run.evaluation_metrics},
                "evaluated": run.evaluation_settings,
            }
            for group in (*groups, *branches)
            for run in group.runs
        },
        "groups": {group.name: [run.name for run in group.runs] for group in groups},
        "comparison": {comparison.b.name: comparison.to_dict() for comparison in comparisons},
        "config_differences": setting_differences(groups),
    }


def report(paths: Sequence[Path], baseline: Path | None, out: Path) -> list[str]:
    """Write a report of run folders to the folder `out`, created if missing, and return its summary for the terminal.

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
    metrics = final_metrics(groups, branches, comparisons, max_step)
    with naming(out):
        out.mkdir(parents=True, exist_ok=True)
        figures = draw_figures([*groups, *branches], comparisons, out)
        # Values from a run's files may be of types that JSON lacks.
        content = json.dumps(replace_nonfinite(metrics), indent=1, allow_nan=False, default=str)
        write_atomically(out / METRICS, f"{content}\n")
    lines = _run_lines([run for group in (*groups, *branches) for run in group.runs])
    for key, values in metrics["config_differences"].items():
        lines.append(f"{key} differs: {', '.join(f'{name} {value}' for name, value in values.items())}")
    for comparison in comparisons:
        lines.append(f"A {comparison.a.title}, B {comparison.b.title}: {comparison.conclusion}")
        lines += [f"    {one}" for one in comparison.over_seeds if one.tag in _PRINTED_METRICS]
    lines += [f"{name}.png has no room for {', '.join(titles)}" for name, titles in figures.items() if titles]
    return [*map(printable, lines), f"written: {out / METRICS}, {len(figures)} PNG files"]


def _run_lines(runs: Sequence[RunSummary]) -> list[str]:
    width, lines = max(len(printable(run.name)) for run in runs), []
    for run in runs:
        values, total, damaged = run.final_values(), run.history.total_steps, run.history.damaged
        notes = [f"{key} {format_number(values[key])}" for key in ("loss/total", "validation/total") if key in values]
        notes += [run.state.cause] if run.state.name != "finished" else []
        notes += [f"{damaged} damaged lines of metrics.jsonl are ignored"] if damaged else []
        progress = f"step {run.history.step:,}" + (f" of {total:,}" if total else "")
        line = [f"{printable(run.name):<{width}}", f"{run.state.name:<8}", progress, *notes]
        lines.append("  ".join(filter(None, line)))
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm report`."""
    about = "Summarize runs, finished or not, in PNG figures, final_metrics.json and a few lines."
    parser = argparse.ArgumentParser("mmldlm report", description=about)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    add("--baseline", type=Path, metavar="RUN", help="run to compare the others with; default: the first")
    add("--out", type=Path, help="folder to write into; default: report in the folder of the first run")
    options = parser.parse_args(argv)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(f"the report needs matplotlib: {install_command('report')}") from None
    with Progress() as progress:
        progress.phase("reading the runs and drawing figures", announce=False)
        lines = report(options.runs, options.baseline, options.out or options.runs[0] / "report")
    print("\n".join(lines))
    return ExitCode.DONE
