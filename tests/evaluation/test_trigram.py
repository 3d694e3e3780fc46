"""The trigram model is a distribution of texts, equals a plain reference, and tells language from its words."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.likelihood import likelihood_of_text
from mmldlm.evaluation.trigram import TrigramModel
from tests.helpers.known_runs import fresh_run

pytestmark = pytest.mark.quick

TEXTS = [[0, 1, 2], [0, 1, 3, 2], [3], [0, 1, 2], [2, 2, 2, 2], [1, 0]]
END = 4


def reference(texts: list[list[int]], text: list[int]) -> float:
    """The nats of a text by the words of the definition, one token at a time."""

    def grams(each: list[int]) -> list[tuple[int, ...]]:
        padded = [END, END, *each, END]
        return list(zip(padded, padded[1:], padded[2:], strict=False))

    counts: dict[int, Counter[tuple[int, ...]]] = {3: Counter(gram for each in texts for gram in grams(each))}
    for order in (2, 1):  # by the different tokens before an n-gram
        before: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for gram in counts[order + 1]:
            before[gram[1:]].add(gram[0])
        counts[order] = Counter({gram: len(tokens) for gram, tokens in before.items()})

    def p(token: int, context: tuple[int, ...], order: int) -> float:
        if order == 0:
            return 1 / (END + 1)
        followers = {gram: count for gram, count in counts[order].items() if gram[:-1] == context}
        lower = p(token, context[1:], order - 1)
        if not followers:
            return lower
        ones, twos = (sum(count == number for count in counts[order].values()) + 0.5 for number in (1, 2))
        discount, total = ones / (ones + 2 * twos), sum(followers.values())
        count = followers.get((*context, token), 0)
        return (max(count - discount, 0) + discount * len(followers) * lower) / total

    return -sum(math.log(p(gram[2], gram[:2], 3)) for gram in grams(text))


def test_nats_are_those_of_the_definition() -> None:
    asked = [*TEXTS, [3, 3, 0], [2, 1, 0, 3, 1]]
    assert TrigramModel(TEXTS, END).nats(asked).tolist() == pytest.approx([reference(TEXTS, text) for text in asked])


def test_texts_and_their_ends_have_a_mass_of_one() -> None:
    """The mass of all texts of up to 7 tokens grows to 1. Texts that go on have the rest."""
    model, mass = TrigramModel([text for text in TEXTS if len(text) < 4], END), 0.0
    for length in range(8):
        mass += float(np.exp(-model.nats([list(text) for text in itertools.product(range(END), repeat=length)])).sum())
    assert 0.98 < mass < 1


def test_held_out_texts_cost_less_than_their_words_in_another_order(tiny_store: Path) -> None:
    evaluation = Evaluation(fresh_run(tiny_store), EvaluationConfig())
    own, rng = evaluation.trigram_bits_per_token(evaluation.tokens), np.random.default_rng(0)
    shuffled = evaluation.trigram_bits_per_token([rng.permutation(text).tolist() for text in evaluation.tokens])
    result = likelihood_of_text(evaluation)
    assert result["controls"]["trigram_bits_per_token_with_length"] == own
    assert own < result["controls"]["unigram_bits_per_token_with_length"] - 1 and own < shuffled - 1
    seen = evaluation.run.store.split("train").samples(np.arange(50))[1]
    assert evaluation.trigram_bits_per_token(seen) < own, "texts that it has counted"
