"""Masked spans of a text are generated given the rest: see `start` of `generate`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.sampling import Generation, Sampler, SamplingConfig
from tests.helpers.toy_pairs import MASK, VOCAB, WORDS, PerfectDenoiser, gaussian, random_pairs, texts_of

pytestmark = pytest.mark.quick

TEXT, LATENT = MaskedDiffusion(MASK, "elbo"), gaussian("vp_cosine", "v", "mse")
PAIRS = random_pairs((4, 12, 30, 30))
# Of the first all, of the others a span in the midst, at the start, at the end.
BLANKS = torch.cat([torch.arange(0, 4), torch.arange(8, 11), torch.arange(16, 26), torch.arange(56, 76)])
SIZES = (4, 3, 10, 20)
KEPT = PAIRS.tokens.index_fill(0, BLANKS, MASK)
OUTSIDE = KEPT != MASK

CONFIGS = [
    SamplingConfig(steps=8, temperature=1.0),
    SamplingConfig(temperature=1.0, steps=10, decoding="confidence"),
    SamplingConfig(temperature=1.0, steps=12, remask=1.0),
    SamplingConfig(temperature=1.0, steps=8, guidance=2.0),
    SamplingConfig(temperature=1.0, steps=1),
]


class Guesser:
    """Knows nothing: any token is as likely. Writes down what it was asked, and about which texts."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]] = []
        self.pairs = PerfectDenoiser(PAIRS, LATENT)

    def __call__(self, tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        samples = self.pairs.find(layout, latents).sample_ids.tolist()
        self.asked.append((tokens.clone(), t_text.clone(), positions.clone(), samples))
        logits = torch.zeros(len(positions), VOCAB)
        logits[:, WORDS:] = -torch.inf
        return logits, latents, torch.zeros(len(latents), 40)


def written(model: object, config: SamplingConfig, kept: torch.Tensor = KEPT, **more: object) -> Generation:
    generator = torch.Generator().manual_seed(0)
    start = texts_of(replace(PAIRS, tokens=kept))
    return Sampler(model, TEXT, LATENT, config, **more).generate("l2t", generator, PAIRS.latents, start)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_unmasked_tokens_stay_clean_at_every_step(config: SamplingConfig) -> None:
    model, steps = Guesser(), []
    made = written(model, config, on_step=lambda tokens, _, t: steps.append((t, tokens.clone())))
    for tokens, _, positions, samples in model.asked:
        outside, truth = (
            torch.cat([whole.split(PAIRS.lengths)[sample] for sample in samples]) for whole in (OUTSIDE, PAIRS.tokens)
        )
        assert torch.equal(tokens[outside], truth[outside])
        assert not outside[positions].any()
    assert len(steps) == 1 + config.steps and steps[0][0] == 1 and steps[-1][0] == 0
    for _, tokens in steps:
        assert torch.equal(tokens[OUTSIDE], PAIRS.tokens[OUTSIDE])
    assert torch.equal(made.tokens, steps[-1][1]) and not (made.tokens == MASK).any()
    assert not torch.equal(made.tokens[BLANKS], PAIRS.tokens[BLANKS])  # who knows nothing writes something else


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_perfect_denoiser_restores_the_text(config: SamplingConfig) -> None:
    assert torch.equal(written(PerfectDenoiser(PAIRS, LATENT), config).tokens, PAIRS.tokens)


def test_only_masked_positions_are_predicted() -> None:
    """`ancestral` predicts each token once, when it is unmasked; `confidence` all masked tokens in every step."""
    model, steps, ancestral = Guesser(), [], SamplingConfig(steps=8, decoding="ancestral")
    written(model, ancestral, on_step=lambda tokens, *_: steps.append(tokens.clone()))
    for (_, _, positions, _), (before, after) in zip(model.asked, pairwise(steps), strict=True):
        assert torch.equal(positions, ((before == MASK) & (after != MASK)).nonzero().squeeze(1))
    assert torch.equal(torch.cat([positions for _, _, positions, _ in model.asked]).sort().values, BLANKS)
    model = Guesser()
    written(model, SamplingConfig(steps=8, decoding="confidence"))
    for tokens, _, positions, _ in model.asked:
        assert torch.equal(positions, (tokens == MASK).nonzero().squeeze(1))


def test_time_matches_the_number_of_masks() -> None:
    model = Guesser()
    written(model, SamplingConfig(steps=5, decoding="confidence"))
    for tokens, t_text, _, samples in model.asked:
        lengths = [PAIRS.lengths[sample] for sample in samples]
        shares = [float((part == MASK).float().mean()) for part in tokens.split(lengths)]
        torch.testing.assert_close(t_text, torch.tensor(shares))
    assert torch.equal(model.asked[0][1], torch.tensor(SIZES) / torch.tensor(PAIRS.lengths))


def test_most_confident_tokens_are_unmasked_first() -> None:
    steps: list[torch.Tensor] = []
    before: list[float] = []
    config = SamplingConfig(steps=5, decoding="confidence")
    written(Guesser(), config, on_step=lambda tokens, *_: steps.append(tokens.clone()))
    for tokens, s in zip(steps, (1.0, 0.8, 0.6, 0.4, 0.2, 0.0), strict=True):
        masks = [int((part == MASK).sum()) for part in tokens.split(PAIRS.lengths)]
        # One token of each text at least, whatever the time.
        assert masks == [min(round(s * size), max(0, size - len(before))) for size in SIZES]
        before.append(s)


def test_context_determines_the_generated_tokens() -> None:
    """Given a model that writes its left neighbor again."""

    def echo(tokens, latents, t_text, t_latent, layout, positions, targets=None):  # type: ignore[no-untyped-def]
        before = tokens[(positions - 1).clamp_min(0)]
        known = F.one_hot(before.clamp_max(WORDS - 1), VOCAB) * 100.0
        return known * (before != MASK)[:, None] + F.one_hot(torch.tensor(5), VOCAB), latents, None

    start = [[10, 11, 12, 13, MASK, *range(15, 22)]]
    made = Sampler(echo, TEXT, LATENT, SamplingConfig(steps=3)).generate(
        "l2t", torch.Generator(), PAIRS.latents[:1], start
    )
    assert made.tokens.tolist() == [10, 11, 12, 13, 13, *range(15, 22)]
