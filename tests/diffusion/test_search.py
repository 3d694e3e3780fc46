"""Search: texts that fit better and better, within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mmldlm.diffusion.noise import RandomSource, SampleStreams, draw_uniform
from mmldlm.diffusion.search import PROPOSALS, search

pytestmark = pytest.mark.quick

MASK, WORDS, LONGEST = 0, 12, 9
TRUE = [[3, 4, 5, 6], [7, 7, 8], [9, 1, 2, 3, 4, 5], [11]]
START = [[3, 9, 5], [7, 7, 8], [9, 1, 2, 2, 4, 5, 5], [2]]  # one too short, perfect, one too long, wrong


def fit_to(wanted: Sequence[list[int]], tokens: list[list[int]], numbers: Sequence[int]) -> Tensor:
    """Return 1 for the wanted text, less for each wrong count of a pair of neighbors or of a token."""

    def parts(text: list[int]) -> list[tuple[int, ...]]:
        return [*pairwise(text), *((token,) for token in text)]

    scores = []
    for text, number in zip(tokens, numbers, strict=True):
        found, expected = parts(text), parts(wanted[number])
        common = sum(min(found.count(part), expected.count(part)) for part in set(found))
        scores.append(2 * common / (len(found) + len(expected)) if text else float("nan"))
    return torch.tensor(scores, dtype=torch.float64)


class Guesses:
    """Fills masks with random words, and counts the texts of each latent."""

    def __init__(self) -> None:
        self.counts, self.calls, self.templates = dict[int, int](), 0, list[list[int]]()

    def __call__(self, templates: list[list[int]], numbers: Sequence[int], source: RandomSource) -> list[list[int]]:
        self.calls += 1
        self.templates += templates
        texts = []
        drawn = draw_uniform(source, 1, [LONGEST] * len(templates)).view(len(templates), LONGEST)
        for template, number, uniform in zip(templates, numbers, drawn.tolist(), strict=True):
            assert MASK in template and 1 <= len(template) <= LONGEST
            self.counts[number] = self.counts.get(number, 0) + 1
            words = (1 + int(value * (WORDS - 1)) for value in uniform)
            texts.append([next(words) if token == MASK else token for token in template])
        return texts


def found(
    budget: int,
    fill_in: Guesses | None = None,
    wanted: Sequence[list[int]] = TRUE,
    rows: Sequence[int] = range(4),
    generator: RandomSource | None = None,
    every_round: bool = False,
) -> list[list[int]]:
    def fit(tokens: list[list[int]], numbers: Sequence[int]) -> Tensor:
        return fit_to([wanted[row] for row in rows], tokens, numbers)

    streams = generator or SampleStreams(0, 0, torch.tensor(rows))
    start = [START[row] for row in rows]
    return search(start, budget, fit, fill_in or Guesses(), MASK, LONGEST, streams, every_round)


def test_more_texts_fit_better_until_they_are_right() -> None:
    fits = [fit_to(TRUE, found(budget), range(4)) for budget in (0, 1, 4, 16, 64, 256, 4096)]
    assert found(0) == START
    assert all((after >= before).all() for before, after in pairwise(fits))
    assert fits[0].mean() + 0.1 < fits[3].mean() < fits[6].mean() - 0.1
    assert sum(text == true for text, true in zip(found(4096), TRUE, strict=True)) >= 3


def test_a_latent_gets_its_budget_until_its_text_is_perfect() -> None:
    never = [[1, 11, 1, 11, 1, 11, 1, 11]] * 4  # too far to be found
    for budget in (1, 4, 7):
        found(budget, guesses := Guesses(), never)
        assert guesses.counts == dict.fromkeys(range(4), budget)
    found(12, guesses := Guesses())
    assert 1 not in guesses.counts, "its text is right from the start"
    found(12, guesses := Guesses(), every_round=True)
    assert guesses.counts == dict.fromkeys(range(4), 12) and guesses.calls == 3


def test_a_text_does_not_depend_on_the_others() -> None:
    together = found(40)
    assert [found(40, rows=[row])[0] for row in range(4)] == together
    first, second = (found(40, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert first == second


def test_the_fit_of_another_latent_does_not_help() -> None:
    other = [*TRUE[1:], TRUE[0]]
    wrong, right = (fit_to(TRUE, found(256, wanted=wanted), range(4)).mean() for wanted in (other, TRUE))
    assert right > fit_to(TRUE, START, range(4)).mean() > wrong


def test_tokens_that_fit_worst_are_masked_most() -> None:
    """The second token of a text of six is wrong, all else is right."""
    masked = torch.zeros(6)
    for seed in range(200):
        guesses = Guesses()
        start, generator = [[9, 6, 2, 3, 4, 5]], torch.Generator().manual_seed(seed)
        search(start, 1, lambda t, n: fit_to([TRUE[2]], t, n), guesses, MASK, LONGEST, generator)
        (template,) = guesses.templates
        masked += torch.tensor([token == MASK for token in template])
    assert PROPOSALS[0][1] == 0 and masked.sum() == 200, "one of six, and no other length"
    assert masked[1] > 2 * masked.sort().values[-2]
