"""`mmldlm compare A B`: the paired difference of two runs, or of two configs that it trains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmldlm.errors import ExitCode, UsageError
from mmldlm.tools.compare.pairs import (
    Difference,
    Pair,
    Verdict,
    pair_by_seed,
    pairing,
    record_difference,
    record_differences,
    seed_differences,
)
from mmldlm.tools.report.comparison import group_runs
from mmldlm.tools.report.run_summary import RunSummary
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.ratio import CONFIDENCE

_MEANINGS: dict[Verdict, str] = {
    "lower": "B is below A",
    "higher": "B is above A",
    "equal": "B differs from A by less than {:g} %",
    "open": "open whether B differs from A by {:g} %, and in which direction",
}


@dataclass(frozen=True)
class Comparison:
    """The differences of one pair of runs, or of several pairs.

    Attributes:
        pairs: A run of A with one of B.
        over_seeds: The verdict is about the mean over pairs, otherwise about the records of the only one.
        loss: The metric that the verdict is about.
        at_least: Smallest difference that matters, as a fraction.
        max_step: Last step whose records count.
    """

    pairs: Sequence[Pair]
    over_seeds: bool
    loss: str
    at_least: float
    max_step: float

    def deciding(self) -> Difference | None:
        """Return the difference that the verdict is about."""
        if self.over_seeds:
            return next((one for one in seed_differences(self.pairs) if one.tag == self.loss), None)
        ((a, b),) = self.pairs
        return record_difference(a.history, b.history, self.loss, self.max_step)

    def verdict(self) -> Verdict:
        """Return the verdict; "open" without any difference."""
        deciding = self.deciding()
        return "open" if deciding is None else deciding.verdict(self.at_least)

    def lines(self) -> list[str]:
        """Return the tables and the verdict for the terminal."""
        lines = []
        for a, b in self.pairs:
            rows = record_differences(a.history, b.history, self.max_step)
            last = f"mean over the records up to step {rows[0].steps[-1]:,}" if rows else "no common records"
            lines += [f"A {a.path}, B {b.path}: {last}", pairing(a.history, b.history), *_table(rows)]
        if rows := seed_differences(self.pairs):
            lines += [f"final values, mean over {len(rows[0].steps)} pairs", *_table(rows)]
        about = "over seeds" if self.over_seeds else "of these two runs alone"
        return [*lines, f"{self.loss} {about}: {_MEANINGS[self.verdict()].format(100 * self.at_least)}"]

    def to_json(self) -> str:
        """Return the JSON object that `--json` prints."""
        pairs = [
            {
                "a": str(a.path),
                "b": str(b.path),
                "pairing": pairing(a.history, b.history),
                "differences": [one.to_dict() for one in record_differences(a.history, b.history, self.max_step)],
            }
            for a, b in self.pairs
        ]
        head = {"loss": self.loss, "at_least": self.at_least, "confidence": CONFIDENCE, "verdict": self.verdict()}
        over_seeds = [one.to_dict() for one in seed_differences(self.pairs)]
        return json.dumps(replace_nonfinite({**head, "pairs": pairs, "over_seeds": over_seeds}), allow_nan=False)


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
    """Parse the command line.

    Raises:
        UsageError: Options that do not fit one another.
    """
    parser = argparse.ArgumentParser(
        "mmldlm compare",
        description="Compare two runs that have the same samples, noise and masks, or several such pairs over seeds. "
        "The intervals hold at all times together, however often one looks.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="two run folders, or more of two configs; with --until two configs")
    add("--until", choices=("decided", "end"), help="train both configs in turns, until decided or to the end")
    add("--seeds", type=int, nargs="+", metavar="SEED", help="with --until: train a pair for each of these seeds")
    add("--turn", type=_positive, metavar="STEPS", help="with --until: length of a turn (default: 10 records)")
    add("--steps", type=_positive, help="last step to compare, and to train; train.steps still sets the schedules")
    add("--loss", default="loss/total", metavar="METRIC", help="metric of the verdict (%(default)s)")
    add("--at-least", type=_fraction, default=0.005, metavar="X%", help="smallest difference that matters (0.5%%)")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.until is None and (options.seeds or options.turn):
        raise UsageError("--seeds and --turn are about training: expected them with --until")
    if options.until is not None and len(options.runs) != 2:
        raise UsageError(f"--until: expected two configs, found {len(options.runs)}")
    options.over_seeds = len(options.runs) > 2 or options.seeds is not None
    if options.over_seeds and options.steps is not None:
        raise UsageError("--steps: pairs of several seeds are compared at their ends")
    if not options.over_seeds and not options.loss.startswith(("loss/", "accuracy/")):
        raise UsageError(f"--loss: one pair has intervals of loss/... and accuracy/... only, found {options.loss}")
    return options


def _read(paths: Sequence[str]) -> list[Pair]:
    runs = [RunSummary(path) for path in paths]
    if len(runs) == 2:
        return [(runs[0], runs[1])]
    groups = group_runs(runs, runs[0])
    pairs = pair_by_seed(*groups) if len(groups) == 2 else []
    if not pairs:
        names = ", ".join(group.title for group in groups)
        raise UsageError(f"expected two runs, or runs of two configs with equal seeds; found those of {names}")
    return pairs


def _train(options: argparse.Namespace) -> Iterator[list[Pair]]:
    """Train one pair after the other; yield all pairs so far after every round of turns."""
    from mmldlm.config import load_config
    from mmldlm.tools.compare.turns import train_in_turns
    from mmldlm.tools.config import config_file

    configs = [load_config(config_file(path)) for path in options.runs]
    pairs: list[Pair] = []
    for seed in dict.fromkeys(options.seeds or [None]):
        arms = configs
        if seed is not None:
            arms = [replace(arm, run=replace(arm.run, seed=seed, dir=f"{arm.run.dir}-seed{seed}")) for arm in configs]
        steps = options.steps or max(arm.train.steps for arm in arms)
        for pair in train_in_turns(arms, options.turn or 10 * arms[0].log.every, steps):
            yield [*pairs, pair]
        pairs.append(pair)


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm compare`; an `MmldlmError` propagates."""
    options = _parse(argv)
    for pairs in _train(options) if options.until else [_read(options.runs)]:
        max_step = math.inf if options.steps is None else options.steps
        comparison = Comparison(pairs, options.over_seeds, options.loss, options.at_least, max_step)
        deciding = comparison.deciding()
        if options.until and deciding is not None and not options.json:
            print(f"{deciding.unit} up to {deciding.steps[-1]:,}: {deciding}", flush=True)
        if options.until == "decided" and comparison.verdict() != "open":
            break
    print(comparison.to_json() if options.json else "\n".join(comparison.lines()))
    return ExitCode.DONE
