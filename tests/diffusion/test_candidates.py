"""The best of several texts of a latent: their lengths, the choice, and no word next to itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.diffusion.candidates import Fit, TextRequest, generate_candidates, lengths_around
from mmldlm.diffusion.decoding import hold_back_doubles, without_neighbors
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import SampleStreams
from mmldlm.diffusion.sampling import Generation, Sampler, SamplingConfig
from tests.helpers.toy_pairs import MASK, VOCAB, WORDS, blanks, gaussian

pytestmark = pytest.mark.quick

TEXT, LATENT = MaskedDiffusion(MASK, "elbo"), gaussian("vp_cosine", "v", "mse")
MEDIAN, LONGEST = 5, 12
LATENTS = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
IS_WORD = torch.arange(VOCAB) < WORDS // 2  # the other half is punctuation


class Network:
    """Expects the same tokens at every place, and texts of `MEDIAN` tokens."""

    def __init__(self, logits: Tensor, certainty: float = 3.0):
        self.certainty = certainty  # of the length: the log of its odds against another one
        self.logits, self.passes = logits, list[tuple[int, ...]]()

    def __call__(
        self,
        tokens: Tensor,
        latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        rows: Tensor,
        _: None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.passes.append(layout.lengths)
        length = torch.zeros(len(latents), LONGEST)
        length[:, MEDIAN - 1] = self.certainty
        return self.logits.expand(len(rows), -1), torch.zeros_like(latents), length


def random_logits() -> Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    logits[WORDS:] = -1e9
    return logits


def best(
    config: SamplingConfig,
    network: Network | None = None,
    fit: Fit | None = None,
    every_step: bool = False,
    **request: Any,
) -> Generation:
    streams = SampleStreams(0, 0, torch.arange(len(LATENTS)))
    sampler = Sampler(network or Network(random_logits()), TEXT, LATENT, config, every_step=every_step)
    return generate_candidates(sampler, streams, TextRequest(LATENTS, LONGEST, **request)).best(fit)


@pytest.mark.setting("sampling.tried_lengths")
def test_lengths_are_around_the_median_and_possible() -> None:
    around = lengths_around(torch.tensor([1, 2, 6, 11]), 5, 12)
    assert around.tolist() == [[1, 2, 3, 4, 5], [2, 1, 3, 4, 5], [6, 5, 7, 4, 8], [11, 10, 12, 9, 8]]
    assert lengths_around(torch.tensor([2]), 5, 3).tolist() == [[2, 1, 3]]
    network = Network(random_logits())
    best(SamplingConfig(tried_lengths=3), network)
    assert network.passes[1] == (4,) * 3 + (5,) * 3 + (6,) * 3
    best(SamplingConfig(tried_lengths=1), network := Network(random_logits()))
    assert network.passes[1] == (5,) * 3


@pytest.mark.parametrize("wanted", [3, 4, 7])
def test_the_text_that_fits_best_is_kept(wanted: int) -> None:
    def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
        assert [int((latents == each).all((1, 2)).sum()) for each in LATENTS] == [5] * 3
        return torch.tensor([-abs(len(text) - wanted) for text in tokens], dtype=torch.float64)

    made = best(SamplingConfig(), fit=fit)
    assert made.lengths == (wanted,) * 3 and torch.equal(made.latents, LATENTS)


def test_a_length_that_the_head_rules_out_is_not_chosen() -> None:
    """A text that is cut may fit as well as the whole one, as where all texts have one length."""

    def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
        return torch.tensor([-float(len(text)) for text in tokens], dtype=torch.float64)

    assert best(SamplingConfig(), Network(random_logits(), 3.0), fit=fit).lengths == (3,) * 3
    assert best(SamplingConfig(), network := Network(random_logits(), 6.0), fit=fit).lengths == (5,) * 3
    assert network.passes[1] == (5,) * 3, "one text needs no unlikely lengths"
    several = best(SamplingConfig(), network := Network(random_logits(), 6.0), fit=fit, count=3)
    assert len(network.passes[1]) == 3 * 5 * 3 and several.lengths[::3] == (5,) * 3


def test_likelihood_decides_where_nothing_can_tell() -> None:
    """A text of the second latent alone has a number, and it is not the most likely one."""

    def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
        known = [
            len(text) == 6 and torch.equal(latent, LATENTS[1]) for text, latent in zip(tokens, latents, strict=True)
        ]
        return torch.tensor([0.1 if each else torch.nan for each in known], dtype=torch.float64)

    network = Network(random_logits())
    likely = best(SamplingConfig(temperature=1.0), network)
    mixed = best(SamplingConfig(temperature=1.0), network, fit=fit)
    assert mixed.lengths[1] == 6
    assert [mixed.split()[index] for index in (0, 2)] == [likely.split()[index] for index in (0, 2)]
    all_of_them = best(SamplingConfig(temperature=1.0), network, count=5).log_p.view(3, 5)
    assert (all_of_them.diff(dim=1) <= 0).all(), "best first"


def test_several_texts_are_drawn_and_differ() -> None:
    made = best(SamplingConfig(), count=4)
    for texts in (made.split()[start : start + 4] for start in (0, 4, 8)):
        assert len(set(map(tuple, texts))) == 4
    assert best(SamplingConfig(), count=4).split() == made.split(), "a function of the streams"
    one = best(SamplingConfig(tried_lengths=1))
    assert set(one.tokens.tolist()) == {int(random_logits().argmax())}, "one text takes the most likely tokens"
    fixed = best(SamplingConfig(), count=2, lengths=[3, 4, 5])
    assert fixed.lengths == (3, 3, 4, 4, 5, 5)


@pytest.mark.parametrize("count", [1, 2])
def test_texts_have_the_order_of_their_latents(count: int) -> None:
    made = best(SamplingConfig(), lengths=[7, 3, 5], count=count)
    assert made.lengths == tuple(length for length in (7, 3, 5) for _ in range(count))
    assert torch.equal(made.latents, LATENTS.repeat_interleave(count, 0))


def test_log_p_is_that_of_the_tokens() -> None:
    made = best(SamplingConfig(temperature=1.0, tried_lengths=1))
    log_p = random_logits().double().log_softmax(0)
    expected = [float(log_p[text].mean()) for text in map(torch.tensor, made.split())]
    torch.testing.assert_close(made.log_p, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.setting("sampling.doubled_words")
@pytest.mark.parametrize("decoding", ["confidence", "ancestral"])
def test_no_word_stands_next_to_itself(decoding: str) -> None:
    """The network expects word 3 everywhere, then word 4, then the sign 20; one token a step."""
    logits = torch.full((VOCAB,), -20.0)
    logits[[3, 4, 20]] = torch.tensor([3.0, 2.0, 1.0])

    def written(doubled_words: str, words: Tensor) -> list[list[int]]:
        config = SamplingConfig(64, temperature=0.0, decoding=decoding, doubled_words=doubled_words)  # type: ignore[arg-type]
        streams = SampleStreams(0, 0, torch.arange(3))
        start = blanks((7, 1, 8))
        return (
            Sampler(Network(logits), TEXT, LATENT, config, words=words).generate("l2t", streams, LATENTS, start).split()
        )

    assert written("allow", IS_WORD) == [[3] * 7, [3], [3] * 8]
    for text in written("avoid", IS_WORD):
        assert all(a != b for a, b in pairwise(text)) and 3 in text
    assert written("avoid", torch.arange(VOCAB) == 4) == [[3] * 7, [3], [3] * 8], "signs may stand next to themselves"


@pytest.mark.setting("sampling.doubled_words")
def test_a_search_puts_no_word_next_to_itself() -> None:
    """The encoder likes word 3: a search would write it everywhere, or take out what stands between two of them."""
    logits = torch.full((VOCAB,), -20.0)
    logits[[3, 4, 20]] = torch.tensor([3.0, 2.0, 1.0])

    def fit(tokens: list[list[int]], latents: Tensor) -> Tensor:
        return torch.tensor([0.99 - 0.01 * sum(token != 3 for token in text) for text in tokens], dtype=torch.float64)

    def searched(doubled_words: str) -> list[list[int]]:
        config = SamplingConfig(64, temperature=0.0, decoding="confidence", doubled_words=doubled_words)  # type: ignore[arg-type]
        sampler = Sampler(Network(logits), TEXT, LATENT, config, words=IS_WORD)
        candidates = generate_candidates(sampler, SampleStreams(0, 0, torch.arange(3)), TextRequest(LATENTS, LONGEST))
        made = replace(candidates.best(fit), tokens=torch.tensor([4, 3, 4, 3, 4] * 3), lengths=(5,) * 3)
        return candidates.edited(made, fit, 8).split()

    assert all(set(text) == {3} for text in searched("allow"))
    for text in searched("avoid"):
        assert all(a != b for a, b in pairwise(text)) and text.count(3) > text.count(4)


def test_words_of_one_step_are_no_neighbors() -> None:
    """The network is sure of word 3 at two places side by side, less of others, and then expects word 4."""

    class ByPlace(Network):
        def __call__(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
            tokens, _, length = super().__call__(*given)
            return tokens + self.certain[given[5]], given[1] * 0, length

        certain = torch.zeros(4, VOCAB)

    network = ByPlace(torch.full((VOCAB,), -20.0))
    for place, (token, logit) in enumerate([(20, 20), (3, 24), (3, 25), (5, 23)]):
        network.certain[place, token] = logit
        network.certain[place, 4] = 19.0

    def written(doubled_words: str) -> list[list[int]]:
        config = SamplingConfig(2, temperature=0.0, decoding="confidence", doubled_words=doubled_words)  # type: ignore[arg-type]
        streams = SampleStreams(0, 0, torch.arange(1))
        return (
            Sampler(network, TEXT, LATENT, config, words=IS_WORD)
            .generate("l2t", streams, LATENTS[:1], blanks((4,)))
            .split()
        )

    assert written("allow") == [[20, 3, 3, 5]] and written("avoid") == [[20, 4, 3, 5]]


def test_only_words_side_by_side_in_a_text_are_held_back() -> None:
    layout = PackedLayout((3, 5), 1, torch.device("cpu"))
    drawn = torch.tensor([3, 3, 5, 5, 20, 20, 5])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 7])
    confidence = -torch.arange(7.0)
    held = hold_back_doubles(confidence, drawn, positions, layout, IS_WORD)
    assert held.isinf().nonzero().flatten().tolist() == [1] and torch.equal(held[2:], confidence[2:])
    rising = hold_back_doubles(-confidence - 7, drawn, positions, layout, IS_WORD)
    assert rising.isinf().nonzero().flatten().tolist() == [0], "the less likely one"
    apart = hold_back_doubles(confidence[:2], torch.tensor([3, 3]), torch.tensor([3, 5]), layout, IS_WORD)
    assert not apart.isinf().any(), "a token lies between them"


def test_a_word_is_no_neighbor_of_another_text() -> None:
    layout = PackedLayout((2, 2), 1, torch.device("cpu"))
    logits = torch.zeros(2, VOCAB)
    tokens = torch.tensor([MASK, 5, MASK, 6])
    kept = without_neighbors(logits, tokens, torch.tensor([0, 2]), layout, IS_WORD)
    assert kept[0, 5] < -1e8 and kept[1, 6] < -1e8 and kept[1, 5] == 0 and int((kept < 0).sum()) == 2


def test_ranks_that_wait_for_each_other_run_equally_often() -> None:
    """Texts that are complete before the last step need no pass, but a rank whose parameters others hold makes it."""
    passes = []
    for every_step in (False, True):
        for lengths in ([2] * 3, [11] * 3):
            network = Network(random_logits())
            best(SamplingConfig(8), network, lengths=lengths, every_step=every_step)
            passes.append(len(network.passes))
    assert passes[0] < passes[1] == passes[2] == passes[3] == 8
