"""Latents of as many vectors as tokens: the arms of the comparison, and its bounds under exact denoisers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from benchmarks import contextual
from benchmarks.common.report import RESULTS
from benchmarks.contextual import ARMS, CHANNELS, DEPTH, LEAST_TIMES, LENGTH, Measured, Pieces
from mmldlm.batch import PackedLayout
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.model.mmdit import MMDiTBlock, count_parameters

pytestmark = pytest.mark.quick
MASK_ID = 2


def coins(count: int) -> Pieces:
    """Texts of independent fair coins, tokens 0 and 1, whose latents are +1 and -1 in all channels."""
    tokens = torch.randint(2, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return Pieces(tokens, (1.0 - 2 * tokens)[..., None].expand(-1, -1, CHANNELS).contiguous())


class ExactDenoiser:
    """The posterior of `coins`: the log odds of a masked token are the sum over channels of 2 alpha z / sigma^2."""

    def __init__(self, objective: Any):
        self.path = objective.latent.path

    def __call__(
        self,
        tokens: Tensor,
        latents: Tensor,
        _: Tensor,
        t: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        true: Tensor,
    ) -> tuple[Tensor, Tensor]:
        t = t.double()[:, None]
        log_odds = 2 * self.path.alpha(t) / self.path.sigma(t).square() * latents.double().sum(-1)  # [B, L]
        tokens = tokens.view_as(log_odds)
        sign = torch.where(tokens == MASK_ID, (log_odds / 2).tanh(), 1.0 - 2 * tokens)
        nll = torch.nn.functional.softplus(-log_odds.flatten()[positions] * (1 - 2 * true))
        return nll, sign[..., None].expand_as(latents)


def test_every_bound_of_exact_denoisers_is_the_entropy() -> None:
    objective = contextual.build_objective("latents", MASK_ID)
    measured = Measured("latents", ExactDenoiser(objective), objective, coins(512)).results()  # type: ignore[arg-type]
    assert measured["text alone"] == pytest.approx(1, abs=1e-6)
    for order in ("together", "latents first"):
        assert [row["s"] for row in measured[order]] == list(LEAST_TIMES)
        for row in measured[order]:
            assert row["bound"] == pytest.approx(1, abs=0.03), (order, row)
    # The latents take what they tell of the text: the text term alone is no bound of anything.
    texts = [row["text"] for row in measured["latents first"]]
    assert texts[0] < 0.01 and texts == sorted(texts) and texts[-1] < 0.95


def test_arms_differ_in_the_latents_alone() -> None:
    pieces = coins(8)
    batch = pieces.batch(np.arange(8))
    noise = contextual.draw(batch, 0, 0, 8)
    noised = {
        arm: contextual.corrupt(contextual.build_objective(arm, MASK_ID), times, arm, batch, noise)
        for arm, times in ARMS.items()
    }
    for arm, found in noised.items():
        assert torch.equal(found.noised_tokens, noised["text"].noised_tokens), arm
        assert torch.equal(found.token_weight, noised["text"].token_weight), arm
    assert torch.equal(noised["text"].noised_latents, noise.epsilon[:, :1])  # nothing of the text
    assert torch.equal(noised["latents"].t_latent, noise.t_latent)


def test_networks_have_equal_parameters_and_aligned_positions() -> None:
    words = {f"w{number}": number for number in range(contextual.VOCAB - 2)}
    tokenizer = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words)))
    networks = {arm: contextual.network(arm, tokenizer, 0) for arm in ARMS}
    sizes = {arm: sum(count_parameters(model).values()) for arm, model in networks.items()}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes

    # Without learned positions and with its gates open, only rotary positions tell which latent belongs to a token.
    model = networks["latents"].eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.latent_position.zero_()
        for name, parameter in model.named_parameters():
            if ".up." in name or name == "latent_head.weight":
                parameter.normal_(0, 0.1, generator=generator)
    tokens = torch.randint(500, (LENGTH,), generator=generator)
    latents = torch.randn(1, LENGTH, CHANNELS, generator=generator)
    layout, t = PackedLayout((LENGTH,), LENGTH), torch.tensor([0.5])

    def logits(order: Tensor) -> Tensor:
        return model(tokens, latents[:, order], t, t, layout, torch.arange(LENGTH)).text

    with torch.no_grad():
        in_order, reversed_order = logits(torch.arange(LENGTH)), logits(torch.arange(LENGTH).flip(0))
        moved = float((in_order - reversed_order).abs().max())
        plain = torch.nn.ModuleList(MMDiTBlock(contextual.JOINT_MODEL) for _ in range(DEPTH))
        plain.load_state_dict(model.blocks.state_dict())
        model.blocks = plain
        in_order, reversed_order = logits(torch.arange(LENGTH)), logits(torch.arange(LENGTH).flip(0))
        rounding = float((in_order - reversed_order).abs().max())
    assert moved > 20 * rounding, (moved, rounding)


def test_the_page_says_what_the_result_shows() -> None:
    """No bound with latents is below one of text alone, by either network; text terms without their cost are."""
    result = json.loads((RESULTS / "contextual.json").read_text(encoding="utf-8"))
    assert len(result["seeds"]) >= 3
    for seed in result["seeds"].values():
        (alone, _), (own, _), *others = contextual.terms(seed).values()
        assert all(text + latent > max(alone, own) for text, latent in others if latent is not None)
        assert all(text < min(alone, own) for text, latent in others if latent is None)
