"""Search: edits that fit better and better, until the text is right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from mmldlm.diffusion.search import COMBINED, PLACES, edited, search

pytestmark = pytest.mark.quick

MASK, WORDS, LONGEST = 0, 12, 9
TRUE = [[3, 4, 5, 6], [7, 7, 8], [9, 1, 2, 3, 4, 5], [11], [1, 2, 3, 4, 5, 6, 7, 8]]
# One token too short, perfect, one too long, wrong, and two tokens in each other's place.
START = [[3, 9, 5], [7, 7, 8], [9, 1, 2, 2, 4, 5, 5], [2], [1, 6, 3, 4, 5, 2, 7, 8]]


def fit_to(wanted: Sequence[list[int]], tokens: Sequence[list[int]], numbers: Sequence[int]) -> Tensor:
    """Return 1 for the wanted text, less for each wrong count of a pair of neighbors or of a token."""

    def parts(text: list[int]) -> list[tuple[int, ...]]:
        return [*pairwise(text), *((token,) for token in text)]

    scores = []
    for text, number in zip(tokens, numbers, strict=True):
        found, expected = parts(text), parts(wanted[number])
        common = sum(min(found.count(part), expected.count(part)) for part in set(found))
        scores.append(2 * common / (len(found) + len(expected)) if text else float("nan"))
    return torch.tensor(scores, dtype=torch.float64)


class Proposals:
    """Proposes the true tokens of a latent, and counts calls and templates."""

    def __init__(self, tokens: Sequence[list[int]] = TRUE) -> None:
        self.tokens, self.calls, self.templates = tokens, 0, list[tuple[int, list[int]]]()

    def __call__(self, templates: list[list[int]], numbers: Sequence[int]) -> list[list[int]]:
        self.calls += 1
        self.templates += zip(numbers, templates, strict=True)
        assert all(text.count(MASK) == 1 for text in templates)
        return [sorted(set(self.tokens[number])) for number in numbers]


def found(
    rounds: int,
    proposals: Proposals | None = None,
    wanted: Sequence[list[int]] = TRUE,
    rows: Sequence[int] = range(len(TRUE)),
    every_round: bool = False,
) -> list[list[int]]:
    def fit(tokens: list[list[int]], numbers: Sequence[int]) -> Tensor:
        return fit_to([wanted[row] for row in rows], tokens, numbers)

    proposals = proposals or Proposals([TRUE[row] for row in rows])
    made = search([START[row] for row in rows], rounds, fit, proposals, MASK, LONGEST, every_round)
    assert all(len(text) <= LONGEST for text in [*made, *(text for _, text in proposals.templates)])
    return made


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmldlm.diffusion.search.FOUND", 0.0)


def test_a_search_that_finds_nothing_near_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text 0 becomes better, but not good, and text 1 becomes right."""

    def fit(texts: list[list[int]], numbers: Sequence[int]) -> Tensor:
        most = [1.0 if number else 0.5 for number in numbers]
        fits = [best - 0.1 * (len(text) - 1) if text else torch.nan for best, text in zip(most, texts, strict=True)]
        return torch.tensor(fits, dtype=torch.float64)

    start = [[1, 2, 3], [4, 5]]
    arguments = start, 9, fit, Proposals([[], []]), MASK, LONGEST
    assert [len(text) for text in search(*arguments)] == [1, 1]
    monkeypatch.setattr("mmldlm.diffusion.search.FOUND", 0.93)
    assert [len(text) for text in search(*arguments)] == [3, 1] and search(*arguments)[0] == start[0]


def test_each_round_fits_better_until_the_text_is_right() -> None:
    fits = [fit_to(TRUE, found(rounds), range(len(TRUE))) for rounds in range(6)]
    assert found(0) == START
    assert all((after >= before).all() for before, after in pairwise(fits))
    assert fits[0].mean() < fits[1].mean() and found(5) == TRUE


def test_right_texts_and_texts_that_no_edit_improves_take_no_more_passes() -> None:
    found(9, proposals := Proposals())
    assert 1 not in dict(proposals.templates), "its text is right from the start"
    assert proposals.calls < 9
    nothing = Proposals([[]] * len(TRUE))
    assert search([[1, 2]], 9, lambda texts, _: torch.zeros(len(texts)), nothing, MASK, LONGEST) == [[1, 2]]
    assert nothing.calls == 1
    found(9, proposals := Proposals(), every_round=True)
    assert proposals.calls == 9, "other ranks may need the passes"


def test_a_text_does_not_depend_on_the_others() -> None:
    assert [found(3, rows=[row])[0] for row in range(len(TRUE))] == found(3)


def test_the_fit_of_another_latent_does_not_help() -> None:
    other = [*TRUE[1:], TRUE[0]]
    wrong, right = (fit_to(TRUE, found(9, wanted=wanted), range(len(TRUE))).mean() for wanted in (other, TRUE))
    assert right > fit_to(TRUE, START, range(len(TRUE))).mean() > wrong


def test_tokens_are_moved_and_left_out_without_the_network() -> None:
    none = Proposals([[]] * len(TRUE))
    texts = found(9, none, rows=[2, 4])
    assert len(texts[0]) < len(START[2])
    one_moved = [[2, 1, 3, 4, 5, 6]]
    assert search(one_moved, 1, lambda t, n: fit_to([[1, 2, 3, 4, 5, 6]], t, n), none, MASK, LONGEST) == [
        [1, 2, 3, 4, 5, 6]
    ]


def test_a_round_edits_several_places_of_a_long_text() -> None:
    """The network is asked about the places without which the text fits best."""
    true = list(range(1, 41))
    wrong = list(true)
    for place in range(0, 40, 5):
        wrong[place] = 99
    proposals = Proposals([true])
    (after,) = search([wrong], 1, lambda texts, _: fit_to([true], texts, [0] * len(texts)), proposals, MASK, 64)
    assert sum(one != other for one, other in zip(after, true, strict=True)) == after.count(99)
    assert wrong.count(99) - after.count(99) == COMBINED
    replaced = [text.index(MASK) for _, text in proposals.templates if len(text) == 40]
    assert len(replaced) == PLACES and {place for place in range(40) if wrong[place] == 99} <= {*replaced}


def test_edits_are_made_together() -> None:
    assert edited([1, 2, 3, 4, 5], [(0, 1, ()), (2, 2, (9,)), (4, 5, (6, 7))]) == [2, 9, 3, 4, 6, 7]
