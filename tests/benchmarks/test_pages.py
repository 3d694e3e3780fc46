"""Figures in README.md and docs/ are those of the committed results."""

from __future__ import annotations

import json

import pytest

from benchmarks import learning, pages
from benchmarks.common.report import ROOT

pytestmark = pytest.mark.quick


def test_tables_are_generated_from_the_committed_results() -> None:
    made = pages.all_blocks()
    for page in pages.pages():
        text = page.read_text(encoding="utf-8")
        assert text == pages.rewritten(text, made), f"{page.name}: run python -m benchmarks pages"
    for name, shown in (
        ("README.md", ["simple-docs-short", "gpu-speed"]),
        ("docs/results.md", learning.CASES.keys()),
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert all(f"<!-- results:{corpus} -->" in text for corpus in shown)
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_figures_are_drawn_from_the_committed_results() -> None:
    for path, figure in pages.figures().items():
        assert path.read_text(encoding="utf-8") == figure, "run python -m benchmarks pages"


def test_the_committed_result_passes_its_bars_in_all_seeds() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8"))
    assert result["corpora"].keys() == learning.CASES.keys()
    for name, corpus in result["corpora"].items():
        assert len(corpus["seeds"]) >= 3 and corpus["settings"] == list(learning.CASES[name].settings)
        rows = learning.judge(learning.CASES[name], corpus["seeds"])
        assert rows and all(row["passed"] == row["of"] == len(corpus["seeds"]) for row in rows), rows
