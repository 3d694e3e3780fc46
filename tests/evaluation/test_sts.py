"""Sentence pairs with similarity scores: formats, refused files and correlations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from mmldlm.data.encoders.lsa import tfidf
from mmldlm.errors import DataError
from mmldlm.evaluation import Evaluation, EvaluationConfig, cosine
from mmldlm.evaluation.sts import Pair, read_pairs, shuffle_pairs, similarity_metrics, sts_metrics, tokenize_sentences
from mmldlm.loading.load import LoadedRun
from tests.helpers.known_runs import fresh_run

pytestmark = pytest.mark.quick

PAIRS = [
    Pair("The rose of soil.", "The tulip of water.", 4.5),
    Pair("The wave.", "The rose of soil.", 0.2),
    Pair("The wave.", "The tide and reef.", 4.0),
    Pair("The oven.", "The violin.", 1.0),
]


@pytest.fixture(scope="module")
def run(tiny_store: Path) -> LoadedRun:
    return fresh_run(tiny_store, "latent.prediction=epsilon")


def test_both_formats_give_the_same_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\t{score}\n" for a, b, score in PAIRS) + "\n")
    rows = (json.dumps({"score": score, "sentence1": a, "sentence2": b, "genre": "x"}) for a, b, score in PAIRS)
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read_pairs(tmp_path / "a.tsv") == read_pairs(tmp_path / "a.jsonl") == PAIRS


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "", ".tsv or .jsonl"),
        ("none.tsv", None, "none.tsv"),
        ("a.tsv", "a\tb\t1\na\tb\n", "line 2"),
        ("a.tsv", "a\tb\tgood\n", "line 1"),
        ("a.tsv", "a\t \t1\n", "line 1"),
        ("a.tsv", "a\tb\tnan\n", "line 1"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": "b"}\n', "line 1: .*sentence1, sentence2, score"),
        ("a.jsonl", '{"sentence1": "a", "sentence2": 3, "score": 1}\n', "line 1"),
        ("a.jsonl", "[1, 2, 3]\n", "line 1"),
        ("a.jsonl", "not json\n", "line 1"),
        ("a.tsv", "a\tb\t1\na\tc\t2\n", "2 pairs.* 3"),
        ("a.tsv", "a\tb\t1\na\tc\t1\nd\te\t1\n", "a.tsv: .*scores"),
    ],
)
def test_malformed_pairs_are_refused(tmp_path: Path, name: str, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=expected):
        read_pairs(tmp_path / name)


def test_too_long_sentence_is_refused(run: LoadedRun) -> None:
    evaluation = Evaluation(run, EvaluationConfig(samples=4))
    with pytest.raises(DataError, match=r"--sts: .*1 to 32 tokens"):
        tokenize_sentences(evaluation, [*PAIRS, Pair("The " * 40, "a", 1.0)])


def test_correlations_match_scipy(run: LoadedRun) -> None:
    evaluation = Evaluation(run, EvaluationConfig(samples=4))
    pairs = [*PAIRS, Pair("zzz qqq", "The wave.", 2.0)]  # of words that the encoder does not know
    result = sts_metrics(evaluation, pairs)
    assert result["sts_pairs"] == 5 and result["sts_unencodable"] == 1
    a, b = (evaluation.run.encoder.encode([pair[side] for pair in PAIRS]) for side in (0, 1))
    scores = [pair.score for pair in pairs]
    assert result["sts_spearman_encoder"] == pytest.approx(scipy.stats.spearmanr(cosine(a, b), scores[:4]).statistic)
    sentences, tokens = tokenize_sentences(evaluation, pairs)
    made = run.store.restore(evaluation.generate_latents(tokens, run.config.sampling))
    a, b = (np.stack([made[sentences.index(pair[side])] for pair in pairs]) for side in (0, 1))
    assert result["sts_spearman"] == pytest.approx(scipy.stats.spearmanr(cosine(a, b), scores).statistic)
    others = shuffle_pairs(pairs, evaluation.config.seed)
    a, b = (np.stack([made[sentences.index(pair[side])] for pair in others]) for side in (0, 1))
    expected = scipy.stats.spearmanr(cosine(a, b), [pair.score for pair in others]).statistic
    assert result["sts_spearman_shuffled"] == pytest.approx(expected)


def test_shuffled_pairs_say_nothing_of_their_scores() -> None:
    """Also if each sentence has three neighboring lines, as in the file of the benchmarks."""
    pairs = [Pair(f"a{index // 3}", f"b{index // 3} {index}", 2 - index % 3) for index in range(300)]
    shuffled = shuffle_pairs(pairs, 0)
    assert sorted(pair.second for pair in shuffled) == sorted(pair.second for pair in pairs)
    assert sorted((pair.first, pair.score) for pair in shuffled) == sorted((pair.first, pair.score) for pair in pairs)
    related = [pair.second.startswith(f"b{pair.first[1:]} ") for pair in shuffled]
    assert np.mean(related) < 0.05
    of_the_best = [3 - int(pair.second.split()[1]) % 3 for pair in shuffled]
    assert abs(scipy.stats.spearmanr(of_the_best, [pair.score for pair in shuffled]).statistic) < 0.2


def test_recall_counts_paraphrases_that_are_nearest() -> None:
    """Against a plain search; two paraphrases are equal, and one has no vector."""
    draw = np.random.default_rng(0)
    names = [f"s{index}" for index in range(130)]
    vectors = draw.normal(size=(130, 6))
    vectors[60:110] = vectors[:50] + draw.normal(size=(50, 6)) * 0.4
    vectors[108], vectors[109] = vectors[60], np.nan
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = [Pair(names[index], names[60 + index], 2) for index in range(50)]
    pairs += [Pair(names[index], names[index + 1], index % 2) for index in range(110, 128)]
    cosines = vectors[:49] @ vectors[60:109].T
    hits = [sum(row >= row[index]) == 1 for index, row in enumerate(cosines)]
    result = similarity_metrics(torch.from_numpy(vectors), names, pairs)
    assert 0.3 < np.mean(hits) < 0.9 and not hits[0] and result["sts_recall_at_1"] == sum(hits) / 50
    known = [pair for pair in pairs if pair.second != "s109"]
    a, b = (vectors[[names.index(pair[side]) for pair in known]] for side in (0, 1))
    expected = scipy.stats.spearmanr((a * b).sum(1), [pair.score for pair in known]).statistic
    assert result["sts_spearman"] == pytest.approx(expected)


def test_tfidf_counts_words_that_are_rare() -> None:
    texts = ["The rose.", "rose the the", "The wave.", "Tulip!", "the tulip", "..."]
    near = (tfidf(texts) @ tfidf(texts).to_dense().T).numpy()
    assert np.allclose(np.diag(near)[:5], 1) and not near[5].any()
    assert near[0, 1] > 0.9 and near[3, 4] > 0.7 and near[0, 3] == 0
    assert 0 < near[0, 2] < 0.4, "plain counts of words have the cosine 0.5"
