"""Figures in README.md and docs/ are those of the committed results."""

from __future__ import annotations

import json

import pytest

from benchmarks import learning
from benchmarks.common.report import ROOT

pytestmark = pytest.mark.quick


def test_tables_are_generated_from_the_committed_results() -> None:
    made = learning.all_blocks()
    for page in learning.pages():
        text = page.read_text(encoding="utf-8")
        assert text == learning.rewritten(text, made), f"{page.name}: run python -m benchmarks pages"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- results:simple-docs -->" in readme and "<!-- results:python-docs -->" in readme


def test_the_committed_result_passes_its_bars_in_all_seeds() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8"))
    assert result["corpora"].keys() == learning.CASES.keys()
    for name, corpus in result["corpora"].items():
        assert len(corpus["seeds"]) >= 5 and not corpus["settings"]
        rows = learning.judge(learning.CASES[name], corpus["seeds"])
        assert rows and all(row["passed"] == row["of"] == len(corpus["seeds"]) for row in rows), rows


def test_a_seed_that_misses_a_bar_is_told() -> None:
    case = learning.Case("", (), {"l2t.bleu": learning.Bar(least=35), "l2t.bits_per_token": learning.Bar(most=7.1)})
    good, bad = ({"metrics": {"l2t": {"bleu": bleu, "bits_per_token": bits}}} for bleu, bits in ((35, 7.1), (34, 7.2)))
    assert [row["passed"] for row in learning.judge(case, [good, bad, good])] == [2, 2]


def test_copies_of_training_texts_are_found_by_their_words() -> None:
    pool = ["Return the list of names.", "A file that does not exist."]
    texts = ["return the list of all names", "A file that does not exist!", "nothing alike here"]
    near, same, other = learning.nearest_word_similarity(texts, pool)
    assert same == 1 and 0.8 < near < 1 and other == 0
