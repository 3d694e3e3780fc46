"""`mmldlm compare A B`: the difference of two runs or two configs, or of two configs that it trains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.report.comparison import Comparison, RunGroup, group_runs
from mmldlm.tools.report.paired import Difference, pairing
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable


def table_lines(comparison: Comparison) -> list[str]:
    """Return the tables and the decision for the terminal."""
    lines = []
    for a, b in comparison.pairs:
        rows = comparison.over_records((a, b))
        last = f"mean over the records up to step {rows[0].steps[-1]:,}" if rows else "no common records"
        lines += [f"A {a.path}, B {b.path}: {last}", pairing(a.history, b.history), *_table(rows)]
    if comparison.is_over_seeds and (rows := comparison.over_seeds):
        lines += [f"final values, mean over {len(rows[0].steps)} {rows[0].unit}", *_table(rows)]
    return [*lines, comparison.conclusion]


def _table(rows: Sequence[Difference]) -> list[str]:
    return [f"    {'':<24} {'A':>9}  {'B - A':>7}", *(f"    {row}" for row in rows if not row.is_detail)]


def _fraction(text: str) -> float:
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise ValueError(text)
    return value


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "mmldlm compare",
        description="Compare two runs that have the same samples, noise and masks, or several such pairs over seeds. "
        "The intervals hold at all times together, however often one looks.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="two run folders, or more of two configs; with --until two configs")
    add("--until", choices=("decided", "end"), help="train both configs in turns, until decided or to the end")
    add("--seeds", type=int, nargs="+", metavar="SEED", help="with --until: train a pair for each of these seeds")
    add("--steps", type=_positive, default=math.inf, help="last step to compare, and to train; schedules stay the same")
    add("--loss", default="loss/total", metavar="METRIC", help="metric of the decision (%(default)s)")
    add("--at-least", type=_fraction, default=0.005, metavar="X%", help="smallest difference that matters (0.5%%)")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.until is None and options.seeds:
        raise UsageError("--seeds: expected with --until, which trains a pair for each")
    if options.until is not None and len(options.runs) != 2:
        raise UsageError(f"--until: expected two configs, found {len(options.runs)}")
    options.over_seeds = len(options.runs) > 2 or options.seeds is not None
    if not options.over_seeds and not options.loss.startswith(("loss/", "accuracy/")):
        raise UsageError(f"--loss: one pair has intervals of loss/... and accuracy/... only, found {options.loss}")
    return options


def _read(options: argparse.Namespace) -> Comparison:
    """Return the comparison of two runs, or of the runs of two configs."""
    runs = [RunSummary(path) for path in options.runs]
    groups = [RunGroup((run,)) for run in runs] if len(runs) == 2 else group_runs(runs, runs[0])
    if len(groups) != 2:
        names = ", ".join(group.title for group in groups)
        raise UsageError(f"expected two runs, or runs of two configs; found those of {len(groups)}: {names}")
    return _comparison(options, groups[0].runs, groups[1].runs)


def _train(options: argparse.Namespace) -> Iterator[Comparison]:
    """Train one pair after the other; yield the comparison of all pairs so far after every round of turns."""
    from mmldlm.config import load_config
    from mmldlm.tools.compare.turns import train_in_turns
    from mmldlm.tools.config import config_file

    configs = [load_config(config_file(path)) for path in options.runs]
    a: list[RunSummary] = []
    b: list[RunSummary] = []
    for number, seed in enumerate(dict.fromkeys(options.seeds or [None])):
        arms = configs
        if seed is not None:
            arms = [replace(arm, run=replace(arm.run, seed=seed, dir=f"{arm.run.dir}-seed{seed}")) for arm in configs]
        for folders in train_in_turns(arms, 10 * arms[0].log.every, options.steps):
            a[number:], b[number:] = ([RunSummary(folder)] for folder in folders)
            yield _comparison(options, a, b)


def _comparison(options: argparse.Namespace, a: Sequence[RunSummary], b: Sequence[RunSummary]) -> Comparison:
    arms = RunGroup(tuple(a)), RunGroup(tuple(b))
    return Comparison(*arms, options.over_seeds, options.steps, options.loss, options.at_least)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm compare`; an `MmldlmError` propagates."""
    options = _parse(argv)
    for comparison in _train(options) if options.until else [_read(options)]:
        if options.until and not options.json:
            a, b = (run.history for run in comparison.pairs[-1])
            line = f"pair {len(comparison.pairs)}, step {min(a.step, b.step):,}: {comparison.deciding or pairing(a, b)}"
            print(printable(line), flush=True)
        if options.until == "decided" and comparison.decision != "open":
            break
    if options.json:
        print(json.dumps(replace_nonfinite(comparison.to_dict()), allow_nan=False))
    else:
        print("\n".join(map(printable, table_lines(comparison))))
    return ExitCode.DONE
