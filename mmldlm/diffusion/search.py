"""Search for the text of a latent: edit a text until the encoder finds the given latent for it.

A generated text that is nearly right has a few tokens that are wrong, missing, superfluous or at another place. Each
round tries single edits of the best text so far, and makes those that bring its latent nearer to the given one. The
network proposes the tokens, given the latent and the rest of the text. (Vec2Text, arXiv 2310.06816, also corrects a
text in rounds by its embedding, with a network that was trained for it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain

from torch import Tensor

from mmldlm.diffusion.decoding import has_doubled_word

PLACES = 16  # of a text, where a round replaces, adds and moves tokens
REACH = 4  # tokens that a token can move at once
PROPOSED = 4  # tokens that the network proposes for a place
COMBINED = 6  # edits of a text that a round can make together
PERFECT = 1 - 1e-6  # a text that fits at least as well is left alone
FOUND = 0.93  # a search that gets no nearer has collected words of a latent that no text has, and is given up

Edit = tuple[int, int, tuple[int, ...]]  # the tokens from the first place to before the second become these
# Returns float64 [k], at most 1: how well texts, given as tokens, fit the latents with the given numbers. NaN: unknown.
Fit = Callable[[list[list[int]], Sequence[int]], Tensor]
# Returns the same as numbers, -1 for an unknown fit and for a text in which a word stands next to itself.
Score = Callable[[list[list[int]], Sequence[int]], list[float]]
# Returns for each of k texts the `PROPOSED` likeliest tokens for its one [MASK], given the latent with this number.
Propose = Callable[[list[list[int]], Sequence[int]], list[list[int]]]


def search(
    texts: Sequence[list[int]],
    rounds: int,
    fit: Fit,
    propose: Propose,
    mask_id: int,
    max_length: int,
    every_round: bool = False,
    single_words: Set[int] = frozenset(),
) -> list[list[int]]:
    """Return a text for each of n latents that fits at least as well as the given text.

    The search for a text ends when the text is perfect, or no edit makes it better. If the text then fits less than
    `FOUND`, the given text is returned.

    Args:
        texts: n texts, as tokens.
        max_length: Tokens of the longest text.
        every_round: Call `propose` in all rounds, since other ranks may need its passes of the network.
        single_words: Tokens that no edit puts next to themselves.
    """

    def score(texts: list[list[int]], numbers: Sequence[int]) -> list[float]:
        fits = fit(texts, numbers).nan_to_num(-1.0).tolist()
        doubled = [has_doubled_word(text, single_words) for text in texts]
        return [-1.0 if is_doubled else value for value, is_doubled in zip(fits, doubled, strict=True)]

    best = list(texts)
    scores = fit(best, range(len(best))).nan_to_num(-1.0).tolist()
    improved = [number for number, value in enumerate(scores) if value < PERFECT]
    for _ in range(rounds):
        if not (improved or every_round):
            break
        edits = _tried_edits(best, improved, score, propose, mask_id, max_length)
        combined = {
            number: _without_overlaps([edit for value, edit in sorted(tried, reverse=True) if value > scores[number]])
            for number, tried in zip(improved, edits, strict=True)
        }
        improved = [number for number, chosen in combined.items() if chosen]
        candidates = [
            (number, edited(best[number], chosen[:count]))
            for number, chosen in combined.items()
            for count in range(1, 1 + len(chosen))
        ]
        reached = score([text for _, text in candidates], [number for number, _ in candidates])
        for (number, text), value in zip(candidates, reached, strict=True):
            if value > scores[number] and len(text) <= max_length:
                best[number], scores[number] = text, value
        improved = [number for number in improved if scores[number] < PERFECT]
    return [text if value >= FOUND else given for text, value, given in zip(best, scores, texts, strict=True)]


def _tried_edits(
    best: Sequence[list[int]], numbers: Sequence[int], score: Score, propose: Propose, mask_id: int, max_length: int
) -> list[list[tuple[float, Edit]]]:
    """Return edits of the texts with these numbers, each with the score of the edited text.

    A token without which a text fits best is probably wrong. All edits but deletions are tried at these places.
    """

    def scored(edits: Sequence[Sequence[Edit]]) -> list[list[tuple[float, Edit]]]:
        made = [edited(best[number], [edit]) for number, tried in zip(numbers, edits, strict=True) for edit in tried]
        owners = [number for number, tried in zip(numbers, edits, strict=True) for _ in tried]
        scores = iter(score(made, owners))
        return [[(next(scores), edit) for edit in tried] for tried in edits]

    shorter = scored([[(place, place + 1, ()) for place in range(len(best[number]))] for number in numbers])
    others, masked = list[list[Edit]](), list[list[Edit]]()
    for number, deletions in zip(numbers, shorter, strict=True):
        text = best[number]
        places = sorted(place for _, (place, _, _) in sorted(deletions, reverse=True)[:PLACES])
        others.append([move for place in places for move in _moves(text, place)])
        gaps = {place + after for place in places for after in (0, 1)} if len(text) < max_length else ()
        masks: list[Edit] = [(place, place + 1, (mask_id,)) for place in places]
        masked.append(masks + [(gap, gap, (mask_id,)) for gap in sorted(gaps)])
    templates = [edited(best[number], [edit]) for number, each in zip(numbers, masked, strict=True) for edit in each]
    proposed = iter(propose(templates, [number for number, each in zip(numbers, masked, strict=True) for _ in each]))
    for number, each, tried in zip(numbers, masked, others, strict=True):
        for start, stop, _ in each:
            tried += [(start, stop, (token,)) for token in next(proposed) if [token] != best[number][start:stop]]
    return [[*deletions, *more] for deletions, more in zip(shorter, scored(others), strict=True)]


def _moves(text: list[int], place: int) -> list[Edit]:
    """Return the edits that move the token at `place` by up to `REACH` places."""
    earlier = [(to, place + 1, (text[place], *text[to:place])) for to in range(max(0, place - REACH), place)]
    end = min(len(text), place + REACH + 1)
    return earlier + [(place, to + 1, (*text[place + 1 : to + 1], text[place])) for to in range(place + 1, end)]


def _without_overlaps(edits: Sequence[Edit]) -> list[Edit]:
    """Return the first `COMBINED` edits that have at least one token between them."""
    kept = list[Edit]()
    for start, stop, tokens in edits:
        if len(kept) < COMBINED and all(stop < other or start > end for other, end, _ in kept):
            kept.append((start, stop, tokens))
    return kept


def edited(text: list[int], edits: Sequence[Edit]) -> list[int]:
    """Return the text with all edits made, which do not overlap."""
    for start, stop, tokens in sorted(edits, reverse=True):
        text = list(chain(text[:start], tokens, text[stop:]))
    return text
