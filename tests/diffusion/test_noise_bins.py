"""Losses by noise bin add up to the logged losses and do not change training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmldlm.batch import ACCURACY_STRIDE
from mmldlm.diffusion.loss_stats import noise_bin_names
from mmldlm.diffusion.masked import Masks
from mmldlm.diffusion.noise import MODES, Noise, draw_noise, mode_weights
from mmldlm.diffusion.objective import Objective
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from tests.helpers.small_model import initialize
from tests.helpers.toy_pairs import MASK, PAD, VOCAB, gaussian, objective, random_pairs

pytestmark = pytest.mark.quick

LENGTHS = tuple([3, 7, 1, 5, 2, 9] * 8)
PAIRS = random_pairs(LENGTHS, channels=6)
ALL = mode_weights({"l2t": 1, "t2l": 1, "joint": 1})


@pytest.fixture(scope="module")
def model() -> MMDiT:
    torch.manual_seed(0)
    model = MMDiT(
        ModelConfig(depth=1, width=32, num_heads=2, conditioning_width=16), DataShape(VOCAB, MASK, PAD, 9, 1, 6)
    )
    initialize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def of_levels(levels: int, text: str = "elbo", masks: Masks = "independent") -> Objective:
    plain = objective(gaussian("vp_cosine", "v", "mse", 6), text=text, masks=masks)
    return Objective(plain.config, plain.text, plain.latent, levels)


def noise() -> Noise:
    return draw_noise(PAIRS, 0, 3, len(LENGTHS), ALL)


@pytest.mark.parametrize("text", ["elbo", "masked_mean"])
def test_bins_are_means_over_their_own_samples(model: MMDiT, text: str) -> None:
    """Against a loop over the samples: which level each belongs to, by its own time in its modality."""
    levels, drawn = 4, noise()
    total = of_levels(levels, text)
    noised = total.corrupt(PAIRS, drawn)
    _, sums = total(model, noised, noised.counts.tolist())
    shown = total.stats.summary(sums, noised.counts)
    nll, latent, *_ = model(*noised.inputs)
    latent_losses = total.latent.losses(latent, noised.latent_target)
    sample = noised.layout.sample_of_token[noised.positions]
    result = np.zeros((2, 3, levels, 2))  # modality, mode, level: sum and count
    for index, length in enumerate(LENGTHS):
        mode = MODES[int(drawn.mode[index])]
        if mode != "t2l":
            own = sample == index
            level = min(int(float(drawn.t_text[index]) * levels), levels - 1)
            count = length if text == "elbo" else int(own.sum())
            result[0, MODES.index(mode), level] += float((noised.token_weight * nll)[own].sum()), count
        if mode != "l2t":
            level = min(int(float(drawn.t_latent[index]) * levels), levels - 1)
            result[1, MODES.index(mode), level] += float(latent_losses[index]), 1
    for place, name in enumerate(("text", "latent")):
        for number, level_name in enumerate(noise_bin_names(levels)):
            value, count = result[place, :, number].sum(0)
            assert count > 0 and shown[f"loss/{name}_noise_{level_name}"] == pytest.approx(value / count, rel=1e-4)
    curves = total.stats.by_noise_bin(sums, noised.counts)
    assert set(curves) == {"text_l2t", "text_joint", "latent_t2l", "latent_joint"}
    for name, curve in curves.items():
        modality, mode = name.split("_")
        expected = result[("text", "latent").index(modality), MODES.index(mode)]  # type: ignore[arg-type]
        for level, value in enumerate(curve):
            count = expected[level, 1]
            assert math.isnan(value) if not count else value == pytest.approx(expected[level, 0] / count, rel=1e-4)


def test_number_of_bins_does_not_change_the_loss(model: MMDiT) -> None:
    results = []
    for levels in (1, 5):
        total = of_levels(levels)
        noised = total.corrupt(PAIRS, noise())
        model.zero_grad()
        loss, sums = total(model, noised, noised.counts.tolist())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append(
            (loss, torch.cat([each.flatten() for each in gradients]), total.stats.summary(sums, noised.counts))
        )
        assert len(sums) == len(noised.counts) == total.stats.size
    (loss, gradient, one), (other_loss, other_gradient, five) = results
    assert torch.equal(loss, other_loss) and torch.equal(gradient, other_gradient)
    assert {name: five[name] for name in one} == pytest.approx(one, rel=1e-5)
    assert not [name for name in one if "noise" in name] and len(five) == len(one) + 2 * 5


def test_fine_bins_add_up_to_coarse_ones(model: MMDiT) -> None:
    coarse = of_levels(5, masks="exact")  # as validation always has them
    fine = coarse.for_validation(6)
    summaries = []
    for total, finer in ((coarse, 1), (fine, 6)):
        noised = total.corrupt(PAIRS, noise())
        _, sums = total(model, noised, noised.counts.tolist())
        summaries.append(total.stats.summary(sums, noised.counts, finer))
    assert summaries[1] == pytest.approx(summaries[0], rel=1e-5)
    assert all(len(curve) == 30 for curve in fine.stats.by_noise_bin(sums, noised.counts).values())
    assert noise_bin_names(5) == ["0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]


@pytest.mark.parametrize("masks", ["independent", "exact"])
def test_accuracy_is_that_of_the_masked_tokens_and_changes_no_loss(model: MMDiT, masks: Masks) -> None:
    plain = of_levels(2, masks=masks)
    counting = Objective(plain.config, plain.text, plain.latent, 2, accuracy=True)
    noised, expected = counting.corrupt(PAIRS, noise()), plain.corrupt(PAIRS, noise())
    loss, sums = counting(model, noised, noised.counts.tolist())
    same_loss, same_sums = plain(model, expected, expected.counts.tolist())
    assert torch.equal(loss, same_loss) and torch.equal(sums[:-1], same_sums)
    assert torch.equal(noised.counts[:-1], expected.counts)
    with torch.no_grad():
        logits, *_ = model(*noised.inputs[:-1])
    right = (logits.argmax(-1) == noised.targets)[::ACCURACY_STRIDE].double().mean()
    summary = counting.stats.summary(sums.double(), noised.counts)
    assert summary["accuracy/masked_tokens"] == pytest.approx(float(right), rel=1e-6)
    assert summary == plain.stats.summary(same_sums.double(), expected.counts) | {
        "accuracy/masked_tokens": summary["accuracy/masked_tokens"]
    }


def test_accuracy_of_micro_batches_counts_each_masked_token_alike(model: MMDiT) -> None:
    plain = of_levels(1)
    counting = Objective(plain.config, plain.text, plain.latent, accuracy=True)
    noised = counting.corrupt(PAIRS, noise())
    _, sums = counting(model, noised, noised.counts.tolist())
    no_text = draw_noise(PAIRS, 0, 3, len(LENGTHS), mode_weights("t2l"))
    t2l = counting.corrupt(PAIRS, no_text)
    _, t2l_sums = counting(model, t2l, t2l.counts.tolist())
    alone = counting.stats.summary(sums.double(), noised.counts)
    both = counting.stats.summary(sums.double() + t2l_sums.double(), noised.counts + t2l.counts)
    assert both["accuracy/masked_tokens"] == alone["accuracy/masked_tokens"], "t2l has no masked tokens"
    assert "accuracy/masked_tokens" not in counting.stats.summary(t2l_sums.double(), t2l.counts)
