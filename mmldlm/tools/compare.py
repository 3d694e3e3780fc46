"""`mmldlm compare A B`: the difference of two runs, or of the runs of two configs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.report.comparison import Comparison, RunGroup, group_runs
from mmldlm.tools.report.paired import Difference, changes, pairing
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable


def table_lines(comparison: Comparison) -> list[str]:
    """Return the tables and the decision for the terminal."""
    lines = []
    for a, b in comparison.pairs:
        rows = comparison.over_records((a, b))
        last = f"mean over the records up to step {rows[0].steps[-1]:,}" if rows else "no common records"
        lines += [f"A {a.path}, B {b.path}: {last}", pairing(a.history, b.history)]
        lines += [*changes(a.history), *changes(b.history), *_table(rows)]
    if comparison.is_over_seeds and (rows := comparison.over_seeds):
        lines += [f"final values, mean over {len(rows[0].steps)} {rows[0].unit}", *_table(rows)]
    return [*lines, comparison.conclusion]


def _table(rows: Sequence[Difference]) -> list[str]:
    return [f"    {'':<24} {'A':>9}  {'B - A':>7}", *(f"    {row}" for row in rows if not row.is_detail)]


def fraction(text: str) -> float:
    """Return the number of an option, which may be in percent."""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


def positive(text: str) -> int:
    """Return the number of an option from 1 on."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm compare`; an `MmldlmError` propagates."""
    parser = argparse.ArgumentParser(
        "mmldlm compare",
        description="Compare two runs that have the same samples, noise and masks, or several such pairs over seeds. "
        "The intervals hold at all times together, however often one looks.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="two run folders, or more of two configs")
    add("--steps", type=positive, default=math.inf, help="last step to compare")
    add("--loss", default="loss/total", metavar="METRIC", help="metric of the decision (%(default)s)")
    add("--at-least", type=fraction, default=0.005, metavar="X%", help="smallest difference that matters (0.5%%)")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    over_seeds = len(options.runs) > 2
    if not over_seeds and not options.loss.startswith(("loss/", "accuracy/")):
        raise UsageError(f"--loss: one pair has intervals of loss/... and accuracy/... only, found {options.loss}")
    runs = [RunSummary(path) for path in options.runs]
    groups = group_runs(runs, runs[0]) if over_seeds else [RunGroup((run,)) for run in runs]
    if len(groups) != 2:
        names = ", ".join(group.title for group in groups)
        raise UsageError(f"expected two runs, or runs of two configs; found those of {len(groups)}: {names}")
    comparison = Comparison(groups[0], groups[1], over_seeds, options.steps, options.loss, options.at_least)
    if options.json:
        print(json.dumps(replace_nonfinite(comparison.to_dict()), allow_nan=False))
    else:
        print("\n".join(map(printable, table_lines(comparison))))
    return ExitCode.DONE
