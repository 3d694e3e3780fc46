"""The formulas behind the metrics match reference libraries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sacrebleu.metrics
import scipy.linalg
import scipy.spatial.distance
import scipy.stats

from mmldlm.data.nearest import unit_vectors
from mmldlm.evaluation.l2t import fault_metrics, reencoding_metrics, reference_metrics
from mmldlm.evaluation.statistics import (
    cosine,
    distinct,
    frechet_distance,
    length_buckets,
    repetition,
    retrieval_ranks,
    share_with_interval,
    spearman,
    token_entropy,
)
from mmldlm.utils.intervals import Ratio, ratio_of_sums

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)


def test_mean_interval_matches_scipy() -> None:
    values = RANDOM.normal(3, 2, 80)
    result = ratio_of_sums(values, np.ones(80))
    assert result.value == pytest.approx(values.mean(), rel=1e-12)
    assert result.standard_error == pytest.approx(scipy.stats.sem(values), rel=1e-12)
    assert result.interval == pytest.approx(scipy.stats.t.interval(0.95, 79, values.mean(), scipy.stats.sem(values)))
    bits = result * 2.0
    low, high = result.interval
    assert bits == Ratio(2 * result.value, (2 * low, 2 * high), 2 * result.standard_error)


def test_ratio_interval_has_its_coverage() -> None:
    """Nats that go with the length, as those of documents do. Of 2,000 draws, 4.5 deviations are 2.2 points."""
    lengths = RANDOM.integers(4, 60, (2000, 100)).astype(float)
    nats = lengths * RANDOM.normal(3, 0.5, lengths.shape) + RANDOM.normal(0, 20, lengths.shape) + 40
    truth = 3 + 40 / 31.5
    intervals = [ratio_of_sums(*draw).interval for draw in zip(nats, lengths, strict=True)]
    covered = np.mean([low <= truth <= high for low, high in intervals])
    assert abs(covered - 0.95) < 0.025
    # As that of a mean of quotients, or as if lengths were all the same, it would be another.
    assert np.mean(
        [ratio_of_sums(n, np.full(100, s.mean())).standard_error for n, s in zip(nats, lengths, strict=True)]
    ) > (1.2 * np.mean([ratio_of_sums(n, s).standard_error for n, s in zip(nats, lengths, strict=True)]))


@pytest.mark.parametrize("levels", [3, 1000])
def test_spearman_matches_scipy(levels: int) -> None:
    a = RANDOM.integers(0, levels, 60).astype(float)
    b = a + RANDOM.integers(0, 2 * levels, 60)
    assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, rel=1e-12)
    assert spearman(a, np.exp(a / levels)) == pytest.approx(1) and spearman(a, -a) == pytest.approx(-1)
    assert math.isnan(spearman(a, np.ones(60)))


@pytest.mark.parametrize(("samples", "features"), [(200, 5), (9, 8), (50, 1)])
def test_frechet_distance_matches_scipy(samples: int, features: int) -> None:
    mixing = RANDOM.normal(size=(features, features))
    a = RANDOM.normal(size=(samples, features))
    b = RANDOM.normal(size=(samples + 7, features)) @ mixing + 0.5
    one, two = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (a, b))
    root = scipy.linalg.sqrtm(one @ two).real
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(one + two - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(a, a + 2) == pytest.approx(4 * features, rel=1e-6)
    with pytest.raises(AssertionError):
        frechet_distance(a[:features], b)


def test_entropy_matches_scipy() -> None:
    texts = [RANDOM.integers(0, 9, size).tolist() for size in (1, 5, 40)]
    expected = [scipy.stats.entropy(np.unique(text, return_counts=True)[1], base=2) for text in texts]
    assert token_entropy(texts) == pytest.approx(np.mean(expected), rel=1e-12)
    assert token_entropy([[7] * 30]) == 0 and token_entropy([list(range(32))]) == pytest.approx(5)


def test_distinct_and_repetition_count_n_grams() -> None:
    texts = [[1, 2, 1, 2, 1], [1, 2], [3]]
    assert distinct(texts, 1) == 3 / 8
    assert distinct(texts, 2) == 2 / 5  # 12 21 12 21, 12
    assert distinct(texts, 3) == 2 / 3
    assert distinct(texts, 6) is None
    assert repetition(texts, 2) == pytest.approx((1 - 2 / 4 + 0) / 2)
    assert repetition(texts, 6) is None
    assert repetition([[4] * 20], 4) == pytest.approx(1 - 1 / 17) and repetition([list(range(20))], 4) == 0


def test_cosine_matches_scipy() -> None:
    a, b = RANDOM.normal(size=(2, 6, 3, 5))
    expected = [
        [1 - scipy.spatial.distance.cosine(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)
    ]
    assert cosine(a, b) == pytest.approx(np.mean(expected, axis=1))
    a[2, 0, 0] = np.nan
    assert np.isnan(cosine(a, b)).tolist() == [False, False, True, False, False, False]
    result = reencoding_metrics(a, b)
    assert result["unencodable"] == 1 and result["reencoded_cosine"] == pytest.approx(
        np.delete(np.mean(expected, 1), 2).mean()
    )
    assert reencoding_metrics(np.full((2, 1, 4), np.nan), np.ones((2, 1, 4)))["reencoded_cosine"] is None


def ranks(made: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return retrieval_ranks(unit_vectors(made) @ unit_vectors(truth).T)


def test_ranks_match_sorting_and_ties_count_as_misses() -> None:
    truth, made = RANDOM.normal(size=(2, 30, 4))
    for row, rank in enumerate(ranks(made, truth)):
        distances = [scipy.spatial.distance.cosine(made[row], candidate) for candidate in truth]
        assert rank == 1 + sorted(distances).index(distances[row])
    assert (ranks(truth, truth) == 1).all()
    twice = np.concatenate([truth, truth])
    assert (ranks(twice, twice) == 2).all()
    made[3] = np.nan
    assert ranks(made, truth)[3] == 30


def test_text_scores_match_sacrebleu() -> None:
    references = ["the cat sat on the mat .", "a second sentence, with words", "Übung macht den Meister"]
    texts = ["the cat sat on a mat .", "a second sentence, with birds", "Übung macht keinen Meister"]
    spelled = [[ord(letter) for letter in text.ljust(40)] for text in references]
    written = [[ord(letter) for letter in text.ljust(40)] for text in texts]
    result = reference_metrics(written, texts, spelled, references)
    assert result["bleu"] == sacrebleu.metrics.BLEU().corpus_score(texts, [references]).score
    assert result["chrf"] == sacrebleu.metrics.CHRF().corpus_score(texts, [references]).score
    assert 20 < result["bleu"] < 90 and 50 < result["chrf"] < 95
    pairs = [a == b for x, y in zip(written, spelled, strict=True) for a, b in zip(x, y, strict=True)]
    assert result["token_accuracy"] == np.mean(pairs)
    assert result["exact_match"] == 0
    result = reference_metrics(spelled, [*references[:2], texts[2]], spelled, references)
    assert result["exact_match"] == 2 / 3 and result["token_accuracy"] == 1


CHINESE = ["今天的天气非常好", "我们一起去公园散步", "他昨天买了三本新书"]


@pytest.mark.setting("evaluation.bleu_tokenize")
@pytest.mark.parametrize(
    ("references", "auto"),
    [
        (["the cat sat on the mat .", "Übung macht den Meister"], "13a"),
        (["오늘 날씨가 매우 좋습니다"], "13a"),
        (CHINESE, "zh"),
        ([*CHINESE, "PyTorch 2.0 很快"], "zh"),
        (["きょうは天気がとても良いです", "公園を散歩しましょう"], "char"),
        (["วันนี้อากาศดีมาก"], "char"),
    ],
)
def test_bleu_has_the_words_of_the_script(references: list[str], auto: str) -> None:
    texts = [reference[:-1] + "x" for reference in references]
    tokens = [list(map(ord, text)) for text in texts], [list(map(ord, text)) for text in references]
    found = {}
    for tokenize in ("auto", "13a", "intl", "zh", "char", "none"):
        found[tokenize] = reference_metrics(tokens[0], texts, tokens[1], references, tokenize=tokenize)["bleu"]
        expected = sacrebleu.metrics.BLEU(tokenize=tokenize.replace("auto", auto), force=True)
        if tokenize == "auto" or auto == "13a":  # other tokenizers find fewer than four words in some scripts
            assert found[tokenize] == expected.corpus_score(texts, [references]).score
    assert 50 < found["auto"] < 100 and len(set(found.values())) > 1


@pytest.mark.parametrize(
    ("texts", "references", "bleu"),
    [
        (["the mat", "a cat sat"], ["the mat", "a cat sat"], 100),
        (["word"], ["word"], 100),
        (["the mat", "a cat"], ["the mat", "a dog"], 100 * math.sqrt(3 / 4 * 1 / 2)),
        (["the cat sat on the mat", "x y"], ["the cat sat on the mat", "x y"], 100),
        (["word"], ["other"], 0),
        (["word"], [""], None),
    ],
)
def test_bleu_of_few_words_is_of_as_many(texts: list[str], references: list[str], bleu: float | None) -> None:
    """Precisions of one and two words by hand; without words in the references there is none."""
    result = reference_metrics([[1]] * len(texts), texts, [[1]] * len(texts), references, with_intervals=True)
    assert result["bleu"] == (None if bleu is None else pytest.approx(bleu))
    assert (result["bleu_ci95"] is None) == (bleu is None)


@pytest.mark.parametrize(
    ("texts", "references", "accuracy"),
    [
        ([[1, 2, 3], [1, 9]], [[1, 2], [1, 2, 3, 4]], 3 / 6),
        ([[1]], [[1, 2, 3, 4]], 1 / 4),
        ([[1, 2, 3, 4]], [[1]], 1),
        ([[2, 1], []], [[1, 2], [1]], 0),
    ],
)
def test_token_accuracy_counts_the_places_of_the_references(
    texts: list[list[int]], references: list[list[int]], accuracy: float
) -> None:
    spelled = [["".join(map(str, text)) for text in each] for each in (texts, references)]
    assert reference_metrics(texts, spelled[0], references, spelled[1])["token_accuracy"] == pytest.approx(accuracy)


def test_faults_of_texts_by_hand() -> None:
    texts = [[2, 1, 3], [3, 2, 1], [1, 2, 3], [1, 1, 3], [1, 3, 3], [2, 1, 3, 3]]  # word 3 may be doubled
    assert fault_metrics(texts, [[1, 2, 3]] * 6, {1, 2}) == {"doubled_words": 1 / 6, "swapped_neighbors": 1 / 6}


def test_intervals_of_text_scores_hold_them_and_narrow_with_more_documents() -> None:
    references = [f"document number {index} has these words in it" for index in range(60)]
    texts = [text.replace("words", "things") if index % 3 else text for index, text in enumerate(references)]
    tokens = [[ord(letter) for letter in text.ljust(50)] for text in references]
    widths = []
    for count in (15, 60):
        result = reference_metrics(
            tokens[:count], texts[:count], tokens[:count], references[:count], with_intervals=True
        )
        for name in ("exact_match", "bleu", "chrf"):
            low, high = result[f"{name}_ci95"]
            assert low < result[name] < high, name
            widths.append(high - low)
    assert all(few > many for few, many in zip(widths[:3], widths[3:], strict=True))


def test_shares_of_none_and_all_have_an_interval() -> None:
    """Wilson's: Table 1 of Newcombe (1998, Statist. Med. 17:857) has 81 of 263 and 0 of 20."""
    for right, count, expected in ((81, 263, [0.2553, 0.3662]), (0, 20, [0.0, 0.1611]), (20, 20, [0.8389, 1.0])):
        share = share_with_interval("exact", np.arange(count) < right)
        assert share["exact"] == right / count and share["exact_ci95"] == pytest.approx(expected, abs=5e-5)


def test_length_buckets_hold_each_document_once() -> None:
    lengths = np.array([1, 8, 9, 16, 40, 64, 65])
    rows, inside = zip(*length_buckets(lengths), strict=True)
    assert [(row["tokens_from"], row["tokens_to"]) for row in rows] == [(1, 8), (9, 16), (33, 64), (65, 128)]
    assert (np.sum(inside, 0) == 1).all()
    assert [row for row, _ in length_buckets(np.array([3]))] == [{"tokens_from": 1, "tokens_to": 8}]


def test_intervals_of_few_documents_are_student_s() -> None:
    """They hold the truth as often as they say, also for two."""
    rng = np.random.default_rng(0)
    for count in (2, 3, 4, 10):
        draws = rng.normal(5.0, 1.0, (4000, count))
        intervals = [ratio_of_sums(values, np.ones(count)).interval for values in draws]
        share = np.mean([low <= 5.0 <= high for low, high in intervals])
        assert 0.935 < share < 0.965, (count, share)
        low, high = scipy.stats.t.interval(0.95, count - 1, draws[0].mean(), scipy.stats.sem(draws[0]))
        assert intervals[0] == pytest.approx((low, high), rel=0.02)
