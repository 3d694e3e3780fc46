"""`mmldlm compare RUN [RUN ...]`: summarize runs and compare them, on the terminal, as JSON and in figures.

It reads only run folders, whatever state the runs are in, and needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm import __version__
from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.compare.comparison import Comparison, RunGroup, group_runs, setting_differences
from mmldlm.tools.compare.figures import draw_figures
from mmldlm.tools.compare.paired import Difference, changes, pairing
from mmldlm.tools.compare.run_summary import RunSummary
from mmldlm.tools.runs import RunState
from mmldlm.utils.files import naming
from mmldlm.utils.format import format_number
from mmldlm.utils.intervals import CONFIDENCE
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable
from mmldlm.utils.progress import Progress
from mmldlm.utils.versions import install_command


def read_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Read each run once and name it after its folder, or after its path if two folders have the same name."""
    # If several paths lead to one folder, we keep the first.
    unique = {path.resolve(): path for path in reversed(paths)}
    runs = [RunSummary(path) for path in reversed(unique.values())]
    counts = Counter(run.name for run in runs)
    for run in runs:
        if counts[run.name] > 1:
            run.name = str(run.path)
    return runs


def read_branches(runs: Sequence[RunSummary]) -> list[RunGroup]:
    """Read the branches that `mmldlm rewind` has set aside. They are shown, but compared with nothing."""
    branches = read_runs([branch for run in runs for branch in sorted(run.path.glob("branches/*"))])
    for branch in branches:
        branch.state = RunState("stopped", cause="left by mmldlm rewind")
    return [RunGroup((branch,)) for branch in branches]


def to_dict(
    groups: Sequence[RunGroup], branches: Sequence[RunGroup], comparisons: Sequence[Comparison], max_step: float
) -> dict[str, Any]:
    """Return the object that `--json` prints. docs/review.md defines its keys."""
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
        # A single comparison is repeated at the top level, where scripts find its decision.
        **(comparisons[0].to_dict() if len(comparisons) == 1 else {}),
    }


def run_lines(runs: Sequence[RunSummary]) -> list[str]:
    """Return a line for each run with its state, progress and losses, and why it ended if it did not finish."""
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


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the tables of a comparison and its decision."""
    lines = []
    for a, b in comparison.pairs:
        rows = comparison.over_records((a, b))
        last = f"mean over the records up to step {rows[0].steps[-1]:,}" if rows else "no common records"
        lines += [f"A {a.path}, B {b.path}: {last}", pairing(a.history, b.history)]
        lines += [*changes(a.history), *changes(b.history), *_table(rows)]
    if comparison.is_over_seeds and (rows := comparison.over_seeds):
        title = f"A {comparison.a.title}, B {comparison.b.title}"
        lines += [f"{title}: final values, mean over {len(rows[0].steps)} {rows[0].unit}", *_table(rows)]
    return [*lines, comparison.conclusion]


def _table(rows: Sequence[Difference]) -> list[str]:
    return [f"    {'':<24} {'A':>9}  {'B - A':>7}", *(f"    {row}" for row in rows if not row.is_detail)]


def fraction(text: str) -> float:
    """Parse an option's number, e.g. "0.005" or "0.5%"."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


def positive(text: str) -> int:
    """Parse an option's whole number, which must be at least 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm compare`. An `MmldlmError` is raised to the caller."""
    parser = argparse.ArgumentParser(
        "mmldlm compare",
        description="Summarize runs, finished or not, and compare each config with that of the first run: by runs that "
        "have the same samples, noise and masks, and over seeds. The intervals hold at all times together, however "
        "often one looks.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folder; runs that differ only in seed are one config")
    add("--steps", type=positive, default=math.inf, help="last step to compare")
    add("--loss", default="loss/total", metavar="METRIC", help="metric of the decision (%(default)s)")
    add("--at-least", type=fraction, default=0.005, metavar="X%", help="smallest difference that matters (0.5%%)")
    add("--json", action="store_true", help="print one JSON object")
    add("--figures", type=Path, metavar="FOLDER", help="draw curves.png and paired.png into this folder")
    options = parser.parse_args(argv)
    if options.figures:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise UsageError(f"--figures needs matplotlib: {install_command('figures')}") from None
    runs = read_runs(options.runs)
    # We compare two runs even if only their seeds differ. Three or more are grouped by config first.
    groups = group_runs(runs) if len(runs) > 2 else [RunGroup((run,)) for run in runs]
    is_over_seeds = any(len(group.runs) > 1 for group in groups)
    if not is_over_seeds and not options.loss.startswith(("loss/", "accuracy/")):
        raise UsageError(
            f"--loss: for one pair, expected loss/... or accuracy/..., which have intervals, found {options.loss}"
        )
    branches = read_branches(runs)
    first, *others = groups
    comparisons = [
        Comparison(
            first, other, len(first.runs) > 1 or len(other.runs) > 1, options.steps, options.loss, options.at_least
        )
        for other in others
    ]
    if options.figures:
        with Progress() as progress, naming(options.figures):
            progress.phase("drawing figures", announce=False)
            options.figures.mkdir(parents=True, exist_ok=True)
            draw_figures([*groups, *branches], comparisons, options.figures)
    if options.json:
        # A run's files may hold values that JSON cannot represent, e.g. dates.
        values = replace_nonfinite(to_dict(groups, branches, comparisons, options.steps))
        print(json.dumps(values, allow_nan=False, default=str))
        return ExitCode.DONE
    lines = run_lines([run for group in (*groups, *branches) for run in group.runs])
    for key, values in setting_differences(groups).items():
        lines.append(f"{key} differs: {', '.join(f'{name} {value}' for name, value in values.items())}")
    for comparison in comparisons:
        lines += comparison_lines(comparison)
    print("\n".join(map(printable, lines)))
    return ExitCode.DONE
