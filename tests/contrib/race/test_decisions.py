"""What a race decides, by values of recorded runs: what luck keeps, what a gain costs, and what its numbers mean.

`recorded.json` has runs of 120 steps (1 block of width 128, batches of 32 sentences of Python's documentation, lr 2e-4,
warm-up 10) from 72 initial weights, and 8 of them with lr 3.8e-4, whose bound is 0.5 % better at the end and 0.9 % at
half of the steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmldlm.contrib.race.arms import BOUND, Arm
from mmldlm.contrib.race.gain import NIGHT, Gain, share
from mmldlm.contrib.race.ledger import Ledger
from mmldlm.contrib.race.race import Proposal, Race
from mmldlm.errors import ConfigError, DataError, MmldlmError
from tests.helpers.tiny_config import TINY

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
STEPS = [30, 60, 90, 120]
SEEDS = 16
SETTINGS = {"train.steps": 120, "log.every": 2, "validation.every": 30, "validation.quality_every": 0}


class ResampledRace(Race):
    """A race whose runs are rows of recorded values."""

    def __init__(self, rows: dict[str, np.ndarray], folder: Path):
        base = Arm("base", "base", SETTINGS, ("base.yaml",))
        super().__init__(Ledger(folder / "ledger"), base, folder, 0.05, 0.002, SEEDS, 3, "", 1, math.inf)
        self.rows = rows

    def train(self, runs: Sequence[tuple[Arm, int]], step: int) -> list[MmldlmError | None]:
        return [None] * len(runs)

    def values(self, key: str, seeds: int, metric: str, step: int) -> np.ndarray:
        return self.rows[key][:seeds, STEPS.index(step)]

    def _record(self, proposals: Sequence[Proposal], results: Sequence[dict[str, Any]]) -> None:
        for one, result in zip(proposals, results, strict=True):
            one.results.append(result)


def races(metric: str, arm: str, numbers: Sequence[int], folder: Path, scale: float = 1.0) -> tuple[float, float]:
    """Share of proposals that are kept, and what they cost until they are decided, in runs.

    Args:
        arm: Where the runs of the proposals are drawn from: the base's own, those that the base does not have, or gain.
        numbers: Numbers of the proposals in their ledgers.
        scale: Factor of their values.
    """
    draw = np.random.default_rng(0)
    runs = {name: np.array(rows) for name, rows in RECORDED[metric].items()}
    kept, cost = 0, 0.0
    for n in numbers:
        order = draw.permutation(len(runs["base"]))
        source = runs["gain"] if arm == "gain" else runs["base"][order[SEEDS:]]
        rows = {"base": runs["base"][order[:SEEDS]], "k": scale * source[draw.choice(len(source), 3, replace=False)]}
        one = Proposal({"n": n, "key": "k", "arm": "k", "metric": metric}, [], Arm("k", "k", {}, ()))
        ResampledRace(rows, folder).run([one])
        kept += one.decision == "keep"
        shown = next((result for result in one.results if result["better"]), one.results[-1])
        cost += shown["seeds"] if shown["seeds"] > 1 else shown["step"] / 120
    return kept / len(numbers), cost / len(numbers)


@pytest.mark.parametrize("metric", [BOUND, "loss/text"])
def test_luck_is_not_kept_and_a_gain_is(metric: str, tmp_path: Path) -> None:
    """40 nights of 100 proposals without effect; a gain by each of several numbers of a night."""
    kept, cost = races(metric, "base", [*range(1, 101)] * 40, tmp_path)
    assert kept * 100 <= 0.05, "at most so many a night"
    assert cost < 1.1
    night = [*range(1, 101, 3)] * 6
    kept, cost = races(metric, "gain", night, tmp_path)
    # The base's runs are shared by the proposals of a night. A gate of three seeds has three runs for each.
    assert kept >= 0.9 and cost + SEEDS / 100 <= 3 / 5
    # The same gain at all steps is seen at the end alone, where luck is smallest.
    kept, cost = races(metric, "base", night, tmp_path, scale=0.995)
    assert kept >= 0.9 and cost < 1.2


def test_the_budget_of_errors() -> None:
    assert sum(map(share, range(1, 10**6))) == pytest.approx(1, abs=1e-3) and sum(map(share, range(1, 10**6))) < 1
    assert sum(map(share, range(1, NIGHT + 1))) == pytest.approx(0.5)
    draw = np.random.default_rng(0)
    for arm, base in ((1, 4), (3, 16)):
        luck = [(draw.normal(9, 1, arm), draw.normal(9, 1, base)) for _ in range(4000)]
        wrong = np.mean([Gain.of(a, b, b).bounds(0.05)[0] > 0 for a, b in luck])
        assert 0.04 < wrong < 0.06, (arm, wrong)


def test_arms(tmp_path: Path, tiny_store: Path) -> None:
    """A comma separates settings, not entries of lists and maps; where a loss means another, the bound is taken."""
    path = tmp_path / "base.yaml"
    path.write_text(TINY.format(run=tmp_path / "run", store=tiny_store), encoding="utf-8")
    base = Arm.base(path)

    def arm(text: str) -> Arm:
        return Arm.parse(text, base, tmp_path)

    several = arm("mode={l2t: 0.5,t2l: 0.5},checkpoint.keep_steps=[1,2],optim.lr=1e-3")
    changes = several.changes(base)
    assert {key: changes[key] for key in ("checkpoint.keep_steps", "optim.lr")} == {
        "checkpoint.keep_steps": [1, 2],
        "optim.lr": 1e-3,
    }
    assert several.arguments[1:] == ("mode={l2t: 0.5,t2l: 0.5}", "checkpoint.keep_steps=[1,2]", "optim.lr=1e-3")
    other = tmp_path / "other.yaml"
    other.write_text("extends: base.yaml\noptim: {lr: 1e-3}\nrun: {dir: elsewhere}\n", encoding="utf-8")
    assert arm(str(other)).key == arm("optim.lr=1e-3").key == arm("optim.lr=0.001").key != arm("optim.lr=2e-3").key
    assert arm("run.init_seed=9").changes(base) == {}
    for text, metric, taken in (
        ("optim.lr=1e-3", "loss/total", "loss/total"),
        ("loss.label_smoothing=0.1", "loss/text", BOUND),
        ("loss.latent_weight=1", "validation/total", BOUND),
        ("ema.decay=0.5", "loss/text", BOUND),
        ("ema.decay=0.5", "validation/total", "validation/total"),
        ("loss.text=masked_mean", "quality/l2t_token_accuracy", "quality/l2t_token_accuracy"),
        ("loss.text=masked_mean", "loss/text", BOUND),
        ("loss.text=masked_mean", BOUND, BOUND),
    ):
        assert arm(text).metric(metric, base) == taken, text
    with pytest.raises(ConfigError, match=r"--metric quality.*loss/latent"):
        arm("mode=t2l").metric("loss/latent", base)
    for text in ("train.steps=9", "train.global_batch_size=4", "validation.samples=8", "resume=never", "no=1"):
        with pytest.raises(ConfigError, match=text.partition("=")[0]):
            arm(text)


def test_the_ledger(tmp_path: Path) -> None:
    """A torn last line is dropped by the next one; any other line that is not one is refused."""
    path = tmp_path / "ledger"
    Ledger(path).append([{"kind": "proposal", "n": 1}, {"kind": "proposal", "n": 2}])
    path.write_bytes(path.read_bytes() + b'{"kind": "pro')
    ledger = Ledger(path)
    ledger.append([{"kind": "result", "n": 2, "gain": math.nan}])
    assert Ledger(path).lines == ledger.lines and ledger.lines[2] == {"kind": "result", "n": 2, "gain": None}
    assert [line["n"] for line in ledger.of_kind("proposal", n=2)] == [2]
    path.write_bytes(path.read_bytes() + b"[1]\n")
    with pytest.raises(DataError, match=r"line 4.*\[1\]"):
        Ledger(path)
