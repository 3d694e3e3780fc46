"""Loss and gradient of a step do not depend on how its global batch is split into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.objective import total_counts
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from tests.helpers.small_model import initialize
from tests.helpers.toy_pairs import MASK, PAD, VOCAB, gaussian, objective, random_pairs, select

pytestmark = pytest.mark.quick

LENGTHS = (3, 3, 7, 1, 5, 5, 2, 9)
PAIRS = random_pairs(LENGTHS, channels=6, latent_tokens=2)
MODES_OF_A_RUN: list[dict[Mode, float]] = [{"l2t": 1}, {"t2l": 1}, {"l2t": 2, "t2l": 1, "joint": 1}]


@pytest.fixture(scope="module")
def model() -> MMDiT:
    torch.manual_seed(0)
    model = MMDiT(
        ModelConfig(depth=2, width=32, num_heads=2, conditioning_width=16), DataShape(VOCAB, MASK, PAD, 9, 2, 6)
    )
    initialize(model)
    with torch.no_grad():
        for parameter in model.parameters():  # at initialization the blocks are switched off
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def step(model: MMDiT, micro_batches: list[list[int]], text: str, loss: Any, mode: dict[Mode, float]) -> torch.Tensor:
    """The step's loss and, behind it, its gradient in one vector [1 + parameters]."""
    total = objective(gaussian("vp_cosine", "v", loss, 6), text=text)
    weights = mode_weights(mode)
    noised = []
    for rows in micro_batches:
        part = select(PAIRS, rows)
        noised.append(total.corrupt(part, draw_noise(part, 0, 3, len(LENGTHS), weights)))
    totals = total_counts(noised).tolist()
    model.zero_grad()
    losses = [total(model, part, totals)[0] for part in noised]
    sum(losses).backward()  # type: ignore[union-attr]
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([sum(losses).detach().view(1), *gradients])  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES_OF_A_RUN, ids=str)
@pytest.mark.parametrize(("text", "loss"), [("elbo", "cosine"), ("masked_mean", "mse")])
@pytest.mark.parametrize(
    "micro_batches",
    [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[6, 3], [0, 1], [5, 4], [7, 2]],
        [[2, 7, 5, 0, 1, 6, 4, 3]],
        [[slot] for slot in range(8)],
    ],
    ids=["2x4", "4x2", "shuffled", "8x1"],
)
def test_micro_batches_do_not_change_loss_or_gradient(
    model: MMDiT, micro_batches: list[list[int]], text: str, loss: str, mode: dict[Mode, float]
) -> None:
    whole = step(model, [list(range(8))], text, loss, mode)
    parts = step(model, micro_batches, text, loss, mode)
    assert whole.isfinite().all() and whole[1:].norm() > 0
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-6, atol=0)
    # 1.6e-6 is what float32 leaves of it when matrix products have other shapes; a wrong count would be 0.1.
    assert (parts[1:] - whole[1:]).norm() <= 5e-6 * whole[1:].norm()


def test_summaries_add_up_over_micro_batches(model: MMDiT) -> None:
    total = objective(gaussian("vp_cosine", "v", "cosine", 6))
    weights = mode_weights({"l2t": 2, "t2l": 1, "joint": 1})

    def summary(micro_batches: list[list[int]]) -> dict[str, float]:
        noised = [
            total.corrupt(part, draw_noise(part, 0, 3, len(LENGTHS), weights))
            for part in (select(PAIRS, rows) for rows in micro_batches)
        ]
        counts = total_counts(noised)
        sums = torch.stack([total(model, part, counts.tolist())[1] for part in noised]).sum(0)
        return total.stats.summary(sums, counts)

    whole = summary([list(range(8))])
    assert set(whole) >= {"loss/total", "loss/text_l2t", "loss/text_joint", "loss/latent_t2l", "loss/latent_joint"}
    assert summary([[3, 1], [0, 2, 4], [7, 6, 5]]) == pytest.approx(whole, rel=1e-5)
    noised = total.corrupt(PAIRS, draw_noise(PAIRS, 0, 3, len(LENGTHS), weights))
    loss, _ = total(model, noised, noised.counts.tolist())
    assert whole["loss/total"] == pytest.approx(loss.item(), rel=1e-5)
