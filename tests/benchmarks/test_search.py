"""The benchmark of the search: its arms, and the encoder of other texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.__main__ import main
from benchmarks.search import BUDGETS, OtherTexts, blocks
from mmldlm.run.load import LoadedRun


def test_arms_are_measured_on_the_same_texts(short_run: LoadedRun, tmp_path: Path) -> None:
    assert main(["search", str(short_run.folder), "--limit", "6", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "search.json").read_text(encoding="utf-8"))
    arms = result["arms"]
    assert {arm["texts"] for arm in arms.values()} == {6}
    passes = [arms[f"`--search {budget}`"]["passes_per_text"] for budget in BUDGETS]
    assert passes == sorted(passes) and passes[0] <= short_run.config.sampling.steps < passes[-1]
    (table,) = blocks(result).values()
    assert all(f"| {name} |" in table for name in arms)


def test_the_wrong_encoder_has_latents_of_other_texts(short_run: LoadedRun) -> None:
    texts = ["The rose of soil.", "The water.", "Soil and water."]
    right, wrong = (encoder.encode(texts) for encoder in (short_run.encoder, OtherTexts(short_run.encoder)))
    assert np.array_equal(wrong[1:], right[:-1]) and np.array_equal(wrong[0], right[-1])
