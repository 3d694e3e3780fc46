"""Tables of paired trials, from the results of their arms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trials import METRICS, add_arm, arm, trial_blocks

pytestmark = pytest.mark.quick


def result(seed: int, value: float) -> dict[str, Any]:
    """Return what training and evaluating a seed gives, each metric being `value`."""
    metrics: dict[str, Any] = {}
    for name in METRICS:
        *parents, last = name.split(".")
        node = metrics
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return {"seed": seed, "train_cpu_s": 60.0 * value, "metrics": metrics}


def test_tables_of_a_trial(tmp_path: Path) -> None:
    add_arm("encoders", "lsa", arm("lsa", [], [], 30.0, [result(0, 1.0), result(1, 3.0)]), tmp_path)
    prepare = ["--encoder=learned"]
    add_arm("encoders", "learned", arm("learned", [], prepare, 90.0, [result(0, 2.0), result(1, 6.0)]), tmp_path)
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert trials["trials"]["encoders"]["learned"]["prepare"] == prepare
    made = trial_blocks(trials)
    assert made["trial-encoders"].splitlines()[-1] == f"| learned |{' +2 ± 1 |' * len(METRICS)}"
    values = made["values-encoders"].splitlines()
    assert values[2] == "| bits, text alone | 2 (1 to 3) | 4 (2 to 6) |" and len(values) == 2 + len(METRICS) + 2
    assert values[-2:] == ["| CPU minutes of `prepare` | 0.5 | 1.5 |", "| CPU minutes of training | 2.0 | 4.0 |"]
    # An arm of an earlier version lacks a metric: the tables have those that all arms have.
    for seed in trials["trials"]["encoders"]["lsa"]["seeds"].values():
        del seed["l2t.bleu"]
    assert "BLEU" not in "".join(trial_blocks(trials).values()) and "chrF" in trial_blocks(trials)["trial-encoders"]
