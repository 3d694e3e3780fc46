"""Figures in README.md and docs/ are those of the committed results."""

from __future__ import annotations

import json

import pytest

from benchmarks import learning, pages, sampling
from benchmarks.common.report import ROOT

pytestmark = pytest.mark.quick


def test_tables_are_generated_from_the_committed_results() -> None:
    made = pages.all_blocks()
    for page in pages.pages():
        text = page.read_text(encoding="utf-8")
        assert text == pages.rewritten(text, made), f"{page.name}: run python -m benchmarks pages"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- results:simple-docs -->" in readme and "<!-- results:python-docs -->" in readme


def test_the_committed_result_passes_its_bars_in_all_seeds() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8"))
    assert result["corpora"].keys() == learning.CASES.keys()
    for name, corpus in result["corpora"].items():
        assert len(corpus["seeds"]) >= 5 and not corpus["settings"]
        rows = learning.judge(learning.CASES[name], corpus["seeds"])
        assert rows and all(row["passed"] == row["of"] == len(corpus["seeds"]) for row in rows), rows


def test_rows_of_several_runs_are_means_with_their_errors() -> None:
    row = {"decoding": "ancestral", "steps": 8, "texts_per_s": 100.0}
    seeds = [[{**row, "temperature": heat, "bleu": bleu - heat} for heat in (0.0, 0.5)] for bleu in (40.5, 42.5)]
    rows = sampling.mean_rows(seeds)
    made = sampling.decoding_blocks({"names": {"own": {"runs": 2, "texts": 10, "tables": {"l2t, own": rows}}}})
    assert rows[1]["bleu"] == 41 and rows[1]["of_runs"]["bleu"] == [40, 42]
    assert made["decoding"].startswith("l2t, own, 2 seeds, 10 texts:")
    assert made["decoding"].endswith("|---|\n| ancestral | 8 | 100 | 41 ± 1 |"), "the highest temperature alone"
