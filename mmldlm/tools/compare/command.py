"""`mmldlm compare A B`: the paired difference of two runs, or of two configs that it trains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.report.comparison import group_runs
from mmldlm.tools.report.paired import Decision, Difference, PairedComparison, PairedRuns
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.printable import printable

_MEANINGS: dict[Decision, str] = {
    "lower": "B is below A",
    "higher": "B is above A",
    "equal": "B differs from A by less than {:g} %",
    "open": "open whether B differs from A by {:g} %, and in which direction",
}


def table_lines(comparison: PairedComparison) -> list[str]:
    """Return the tables and the decision for the terminal."""
    lines = []
    for pair in comparison.pairs:
        rows = pair.differences
        last = f"mean over the records up to step {rows[0].steps[-1]:,}" if rows else "no common records"
        lines += [f"A {pair.a.path}, B {pair.b.path}: {last}", pair.pairing, *_table(rows)]
    if rows := comparison.over_seeds:
        lines += [f"final values, mean over {len(rows[0].steps)} pairs", *_table(rows)]
    about = "over seeds" if comparison.is_over_seeds else "of these two runs alone"
    meaning = _MEANINGS[comparison.decision].format(100 * comparison.at_least)
    return [*lines, f"{comparison.loss} {about}: {meaning}"]


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
    if options.over_seeds and options.steps < math.inf:
        raise UsageError("--steps: pairs of several seeds are compared at their ends")
    if not options.over_seeds and not options.loss.startswith(("loss/", "accuracy/")):
        raise UsageError(f"--loss: one pair has intervals of loss/... and accuracy/... only, found {options.loss}")
    return options


def _read(options: argparse.Namespace) -> Sequence[PairedRuns]:
    """Return the two runs as a pair, or the pairs of equal seed of more runs of two configs."""
    runs = [RunSummary(path) for path in options.runs]
    if len(runs) == 2:
        return [PairedRuns(runs[0], runs[1], options.steps)]
    groups = group_runs(runs, runs[0])
    if len(groups) != 2 or not (pairs := PairedComparison.of_groups(*groups).pairs):
        names = ", ".join(group.title for group in groups)
        raise UsageError(f"expected two runs, or runs of two configs with equal seeds; found those of {names}")
    return pairs


def _train(options: argparse.Namespace) -> Iterator[list[PairedRuns]]:
    """Train one pair after the other; yield all pairs so far after every round of turns."""
    from mmldlm.config import load_config
    from mmldlm.tools.compare.turns import train_in_turns
    from mmldlm.tools.config import config_file

    configs = [load_config(config_file(path)) for path in options.runs]
    pairs: list[PairedRuns] = []
    for seed in dict.fromkeys(options.seeds or [None]):
        arms = configs
        if seed is not None:
            arms = [replace(arm, run=replace(arm.run, seed=seed, dir=f"{arm.run.dir}-seed{seed}")) for arm in configs]
        for a, b in train_in_turns(arms, 10 * arms[0].log.every, options.steps):
            yield [*pairs, pair := PairedRuns(RunSummary(a), RunSummary(b), options.steps)]
        pairs.append(pair)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm compare`; an `MmldlmError` propagates."""
    options = _parse(argv)
    for pairs in _train(options) if options.until else [_read(options)]:
        comparison = PairedComparison(pairs, options.over_seeds, options.loss, options.at_least)
        if options.until and not options.json:
            step = min(pairs[-1].a.history.step, pairs[-1].b.history.step)
            print(
                printable(f"pair {len(pairs)}, step {step:,}: {comparison.deciding or pairs[-1].pairing}"), flush=True
            )
        if options.until == "decided" and comparison.decision != "open":
            break
    if options.json:
        print(json.dumps(replace_nonfinite(comparison.to_dict()), allow_nan=False))
    else:
        print("\n".join(map(printable, table_lines(comparison))))
    return ExitCode.DONE
