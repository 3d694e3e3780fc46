"""Paired comparison of runs, `mmldlm compare`: how much pairing saves, and how often a decision is wrong.

    python -m benchmarks paired [--pairs 30] [--experiments 200]

Tiny networks on synthetic text. Three kinds of pairs, all of runs that are really trained:

- changed: A and B differ in the learning rate alone, under each seed. Unpaired: B has the samples, noise and initial
  weights of the next seed.
- luck: A and A again, with the same samples and noise, but other initial weights. Their decisions over seeds are false.
- exchanged: of a changed or lucky pair, which run is called A is drawn anew for each record. So the expected difference
  of every record is 0, whatever the runs do, and decisions over records are false.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import (
    circumstances,
    markdown,
    parse,
    parser,
    positive,
    print_status,
    work_dir,
    write_json,
)
from mmldlm.config import load_config
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.tools.report.paired import Difference, Unit
from mmldlm.tools.run_history import History
from mmldlm.train import train

LOSSES = ("loss/total", "loss/text")
LR, CHANGED_LR = 3e-3, 2.2e-3
EFFECT = 0.005  # relative difference of which the table tells how much it takes
SETTLED = 2  # first records that do not count in their scatter: the loss falls steeply there
RING = 10  # runs of a seed that are pairs with their neighbors
LOOK_EVERY = 10  # steps
SETTINGS = (
    "model={depth: 2, width: 32, num_heads: 2, conditioning_width: 32, modulation_rank: 8}",
    "validation.every=0",
    "checkpoint.every_steps=0",
    "train.global_batch_size=8",
    "log.tensorboard=false",
    "data.verify=sizes",
    "data.num_workers=0",
)
WORDS = 60
Curves = Mapping[str, np.ndarray]  # values of the steps, by metric


def write_store(folder: Path) -> Path:
    """Prepare a store of 2,000 synthetic sentences, in which each word has a few likely successors."""
    draw = random.Random(0)
    words = ["".join(draw.choice("bdfgklmnprst") + draw.choice("aeiou") for _ in range(2)) for _ in range(WORDS)]
    lines = []
    for _ in range(2000):
        word, line = draw.randrange(WORDS), []
        for _ in range(draw.choice([4, 6, 9, 13])):
            line.append(words[word])
            word = (3 * word + draw.choice([1, 1, 1, 2, 2, 5])) % WORDS
        lines.append(" ".join(line) + ".")
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = {"vocab_size": 300, "channels": 8, "max_length": 32, "validation_fraction": 0.05, "test_fraction": 0.05}
    with redirect_stdout(io.StringIO()):
        prepare(PrepareConfig(str(folder / "store"), (str(folder / "corpus.txt"),), **options), progress=False)  # type: ignore[arg-type]
    return folder / "store"


class Runs:
    """Trains runs, each in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.store, self.count = folder, write_store(folder), 0

    def curves(self, steps: int, every: int, seed: int, lr: float = LR, init_seed: int | None = None) -> Curves:
        """Train a run; return its records, one for `every` steps."""
        self.count += 1
        run = self.folder / f"run-{self.count}"
        weights = "null" if init_seed is None else init_seed
        own = (f"run={{dir: {run}, seed: {seed}, init_seed: {weights}}}", f"data.path={self.store}", f"optim.lr={lr}")
        config = load_config(None, [*SETTINGS, *own, f"train.steps={steps}", f"log.every={every}"])
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            train(config)
        history = History(run)
        return {loss: np.array(history.series(loss, "train").values) for loss in LOSSES}


def final(curves: Curves, loss: str) -> float:
    """Return the mean of the last tenth, as reports and comparisons over seeds have it."""
    values = curves[loss]
    return float(values[-max(1, len(values) // 10) :].mean())


def difference(unit: Unit, a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> Difference:
    return Difference.between("", unit, range(1, len(a) + 1), np.asarray(a), np.asarray(b))


def first_decision(one: Difference) -> int | None:
    """Return the number of records or pairs after which an interval first excluded 0; None if none did."""
    excluding = np.flatnonzero(np.abs(one.means) > one.half_widths)
    return int(excluding[0]) + 1 if len(excluding) else None


def share(decisions: Iterable[bool]) -> float:
    return float(np.mean(list(decisions)))


def shifted(differences: np.ndarray, baseline: float) -> np.ndarray:
    """Return differences with a mean of exactly `EFFECT`, relative to the baseline, and their own scatter and drift."""
    return differences - differences.mean() + EFFECT * baseline


def pairs_needed(differences: np.ndarray, baseline: float) -> int | None:
    """Return the median number of pairs to a decision on a difference of `EFFECT`, of pairs drawn with replacement."""
    draw = np.random.default_rng(0)
    values = shifted(differences, baseline)
    numbers = [first_decision(difference("pairs", np.zeros(5000), draw.choice(values, 5000))) for _ in range(50)]
    return median(numbers)


def median(numbers: Iterable[int | None]) -> int | None:
    """Return the median, in which None is more than any number."""
    middle = float(np.median([number or np.inf for number in numbers]))
    return int(middle) if np.isfinite(middle) else None


def compare_changed(arms: Sequence[tuple[Curves, Curves]], loss: str) -> list[dict[str, Any]]:
    """Return what tells two learning rates apart, paired and unpaired, by what is compared."""
    a, b = (np.array([pair[arm][loss] for pair in arms]) for arm in (0, 1))  # [pairs, steps]
    differences = {"paired": b - a, "unpaired": np.roll(b, -1, axis=0) - a}
    level, steps = float(a.mean()), a.shape[1]

    def row(name: str, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
        paired, unpaired = values.values()
        return {
            "metric": loss,
            "value": name,
            "difference %": 100 * float(paired.mean()) / level,
            "standard deviation, paired %": 100 * float(paired.std()) / level,
            "unpaired %": 100 * float(unpaired.std()) / level,
            "variance, paired / unpaired": float(paired.var() / unpaired.var()),
        }

    records = {kind: each.reshape(len(arms), -1, LOOK_EVERY).mean(2) for kind, each in differences.items()}
    scatter = {kind: each[:, SETTLED:] - each[:, SETTLED:].mean(1, keepdims=True) for kind, each in records.items()}
    tails = {kind: each[:, -(steps // 10) :].mean(1) for kind, each in differences.items()}
    means = {kind: each.mean(1) for kind, each in differences.items()}
    rows = [row("records within a run", scatter), row("mean of the run", means), row("last tenth of the run", tails)]
    rows[0].pop("difference %")
    for kind, each in differences.items():
        between_two = [first_decision(difference("records", np.zeros(steps), shifted(one, level))) for one in each]
        rows[0] |= {
            f"steps for 0.5 %, {kind}": median(between_two),
            f"decided in {steps} steps, {kind}": share(number is not None for number in between_two),
        }
        rows[1][f"pairs for 0.5 %, {kind}"] = pairs_needed(means[kind], level)
        rows[2][f"pairs for 0.5 %, {kind}"] = pairs_needed(tails[kind], level)
    return rows


def exchanged_decisions(arms: Sequence[tuple[Curves, Curves]], loss: str, every: int, count: int) -> float:
    """Return the share of false decisions in `count` pairs, looked at each record of `every` steps."""
    draw = np.random.default_rng(0)
    false = []
    for index in range(count):
        one, two = (curves[loss].reshape(-1, every).mean(1) for curves in arms[index % len(arms)])
        keep = draw.random(len(one)) < 0.5
        pair = np.where(keep, one, two), np.where(keep, two, one)
        false.append(first_decision(difference("records", *pair)) is not None)
    return share(false)


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of docs/trust.md."""
    tables = result["tables"]
    return {
        "paired-two-runs": markdown(tables["two runs"]),
        "paired-over-seeds": markdown(tables["over seeds"]),
        "paired-decisions": markdown(tables["wrong decisions"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("paired", "How much pairing saves, and how often decisions of `mmldlm compare` are wrong.")
    add = options.add_argument
    add("--pairs", type=positive, default=30, help="pairs of the changed learning rate, and of luck (%(default)s)")
    add("--steps", type=positive, default=150, help="their steps (%(default)s)")
    add("--experiments", type=positive, default=200, help="comparisons of a config with itself (%(default)s)")
    add("--seeds", type=positive, default=4, help="pairs of each of them (%(default)s)")
    add("--short", type=positive, default=20, help="steps of their runs (%(default)s)")
    options.set_defaults(name="paired")
    given = parse(options, argv, pairs=3, steps=40, experiments=10, seeds=3, short=10)
    with work_dir(given) as folder:
        runs = Runs(folder)
        changed, luck = [], []
        for seed in range(given.pairs):
            base = runs.curves(given.steps, 1, seed)
            changed.append((base, runs.curves(given.steps, 1, seed, lr=CHANGED_LR)))
            luck.append((base, runs.curves(given.steps, 1, seed, init_seed=1000 + seed)))
            print_status(f"seed {seed}")
        lucky = []  # pairs of a config with itself, each with the same samples and noise
        for seed in range(given.experiments * given.seeds // RING):
            ring = [runs.curves(given.short, LOOK_EVERY, 10_000 + seed, init_seed=arm) for arm in range(RING)]
            lucky += [(ring[arm - 1], ring[arm]) for arm in range(RING)]
            print_status(f"{len(lucky)} pairs of {given.experiments * given.seeds}")
    # The pairs of an experiment have different seeds, and each pair is in one experiment.
    count = len(lucky) // given.seeds
    experiments = [lucky[first::count] for first in range(count)]
    wrong = []
    for loss in LOSSES:
        finals = [np.array([[final(curves, loss) for curves in pair] for pair in pairs]).T for pairs in experiments]
        over_seeds = [first_decision(difference("pairs", *one)) is not None for one in finals]
        row: dict[str, Any] = {
            "metric": loss,
            "other initial weights, over seeds": share(over_seeds),
            "exchanged, each step": exchanged_decisions([*changed, *luck], loss, 1, given.experiments),
            f"exchanged, each {LOOK_EVERY} steps": exchanged_decisions(
                [*changed, *luck], loss, LOOK_EVERY, given.experiments
            ),
            "other initial weights, two runs": share(
                first_decision(difference("records", a[loss], b[loss])) is not None for a, b in luck
            ),
            "their standard deviation %": 100
            * float(np.std([final(b, loss) - final(a, loss) for a, b in luck], ddof=1))
            / float(np.mean([final(a, loss) for a, _ in luck])),
        }
        wrong.append(row)
    changes = [compare_changed(changed, loss) for loss in LOSSES]
    tables = {
        "two runs": [rows[0] for rows in changes],
        "over seeds": [row for rows in changes for row in rows[1:]],
        "wrong decisions": wrong,
    }
    result = {
        **circumstances(torch.device("cpu")),
        "benchmark": "paired",
        "settings": {name: getattr(given, name) for name in ("pairs", "steps", "experiments", "seeds", "short")},
        "lr": [LR, CHANGED_LR],
        "runs": runs.count,
        "tables": tables,
    }
    write_json(result, given.out, given.name)
    for title, rows in tables.items():
        print(f"{title}\n\n{markdown(rows)}\n")
    return 0
