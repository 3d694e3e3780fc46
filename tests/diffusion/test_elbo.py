"""The text loss is a likelihood bound: 0 for a perfect denoiser, log V for a uniform one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mmldlm.diffusion.gaussian import LatentLoss, PredictionType
from mmldlm.diffusion.masked import MaskedDiffusion, Masks, TextConfig
from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.noise_schedule import MIN_TEXT_TIME, NoiseScheduleName
from mmldlm.diffusion.objective import total_counts
from tests.helpers.toy_pairs import (
    LOSSES,
    MASK,
    PREDICTIONS,
    SCHEDULE_NAMES,
    VOCAB,
    WORDS,
    PerfectDenoiser,
    gaussian,
    objective,
    random_pairs,
)

pytestmark = pytest.mark.quick

PAIRS = random_pairs((4,) * 100 + (9,) * 100)
SIZE = len(PAIRS.lengths)


def uniform_words(tokens, latents, t_text, t_latent, layout, positions, targets):  # type: ignore[no-untyped-def]
    """A network that gives each of the `WORDS` real tokens the same probability, [MASK] and [PAD] none."""
    logits = torch.zeros(len(positions), VOCAB)
    logits[:, WORDS:] = -1e9
    return F.cross_entropy(logits, targets, reduction="none"), torch.zeros_like(latents), torch.zeros(len(latents), 9)


@pytest.mark.parametrize("text", ["elbo", "masked_mean"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_perfect_denoiser_has_no_loss(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss, text: str
) -> None:
    latent = gaussian(schedule, prediction, loss)
    total = objective(latent, text=text)
    weights = mode_weights({"l2t": 1, "t2l": 1, "joint": 2})
    noised = total.corrupt(PAIRS, draw_noise(PAIRS, seed=0, step=0, global_batch_size=SIZE, weights=weights))
    loss_value, sums = total(PerfectDenoiser(PAIRS, latent), noised, noised.counts.tolist())
    assert float(loss_value) < 1e-4
    assert all(value < 1e-4 for value in total.stats.summary(sums, noised.counts).values())


@pytest.mark.parametrize("mode", ["l2t", "joint"])
def test_the_bound_of_a_uniform_predictor_is_log_v(mode: Mode) -> None:
    """Compare the estimate with log V, within 4.5 standard deviations.

    A token counts 1 / t with probability t, t uniform above some s: mean 1 and variance log(1 / s) - 1 + s.
    Given t the masks are independent, so over n tokens the deviation is at most log V sqrt(variance / n): 0.76 % here.
    """
    bound, steps = objective(), 80
    sums, counts = [], []
    for step in range(steps):
        noise = draw_noise(PAIRS, seed=0, step=step, global_batch_size=SIZE, weights=mode_weights(mode))
        noised = bound.corrupt(PAIRS, noise)
        _, part = bound(uniform_words, noised, noised.counts.tolist())
        sums.append(part)
        counts.append(noised)
    nats = bound.stats.summary(torch.stack(sums).sum(0), total_counts(counts))["loss/text"]
    tokens = steps * len(PAIRS.tokens)
    deviation = math.sqrt((math.log(1 / MIN_TEXT_TIME) - 1 + MIN_TEXT_TIME) / tokens)
    assert deviation < 0.008
    assert nats / math.log(WORDS) == pytest.approx(1, abs=4.5 * deviation)


def test_exact_masks_have_their_counts_and_every_place_alike() -> None:
    text, steps, times = MaskedDiffusion(MASK, "elbo", "exact"), 400, torch.tensor([0.001, 0.29, 0.5, 1.0, 0.0])
    lengths = torch.tensor([4, 10, 6, 3, 5])
    sample = torch.arange(5).repeat_interleave(lengths)
    draw = torch.Generator().manual_seed(0)
    masked = torch.stack(
        [text.token_mask(torch.rand(len(sample), generator=draw), times, sample) for _ in range(steps)]
    )
    counts = torch.zeros(steps, 5, dtype=torch.int64).index_add(1, sample, masked.long())
    assert (counts == torch.tensor([1, 3, 3, 3, 0])).all()
    frequency = masked.double().mean(0)[sample == 1]  # deviation sqrt(0.3 x 0.7 / 400) = 0.023
    assert (frequency - 0.3).abs().max() < 0.1


def test_exact_counts_of_a_long_text_are_uniform() -> None:
    """Each number of masks is as likely as any other, down to a single one: no clamp of the times."""
    count, length = 6000, 3000
    batch = random_pairs((1,) * count, channels=1)
    noise = draw_noise(batch, 0, 0, count, mode_weights("l2t"), TextConfig(masks="exact").sampler)
    text = MaskedDiffusion(MASK, "elbo", "exact")
    weight = text.weights(noise.t_text, torch.full((count,), length), noise.importance)
    masks = (length / weight).round().long()
    assert torch.bincount(masks, minlength=length + 1).tolist() == [0] + [count // length] * length


def test_exact_masks_have_no_variance() -> None:
    bound = objective(masks="exact")
    noised = bound.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint")))
    _, sums = bound(uniform_words, noised, noised.counts.tolist())
    assert bound.stats.summary(sums, noised.counts)["loss/text"] == pytest.approx(math.log(WORDS), rel=1e-5)


@pytest.mark.parametrize("masks", ["independent", "exact"])
def test_both_kinds_of_masks_estimate_one_bound(masks: Masks) -> None:
    """A masked token costs the fraction of its text that is masked, n / L, so the bound is its mean over n = 1..L."""

    def network(tokens, latents, t_text, t_latent, layout, positions, targets):  # type: ignore[no-untyped-def]
        sample = layout.sample_of_token
        count = torch.bincount(sample[positions], minlength=SIZE).float()
        nll = (count / torch.tensor(layout.lengths))[sample[positions]]
        return nll, torch.zeros_like(latents), torch.zeros(SIZE, 9)

    bound, steps = objective(masks=masks), 60
    sums, counts = [], []
    for step in range(steps):
        noised = bound.corrupt(PAIRS, draw_noise(PAIRS, 0, step, SIZE, mode_weights("l2t")))
        sums.append(bound(network, noised, noised.counts.tolist())[1])
        counts.append(noised)
    nats = bound.stats.summary(torch.stack(sums).sum(0), total_counts(counts))["loss/text"]
    expected = (100 * 4 * (5 / 8) + 100 * 9 * (10 / 18)) / 1300
    assert nats == pytest.approx(expected, rel=0.02 if masks == "independent" else 0.004)


def test_masked_mean_of_a_uniform_predictor_is_log_v_exactly() -> None:
    mean = objective(text="masked_mean")
    noised = mean.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("joint")))
    _, sums = mean(uniform_words, noised, noised.counts.tolist())
    assert mean.stats.summary(sums, noised.counts)["loss/text"] == pytest.approx(math.log(WORDS), rel=1e-5)


def test_the_length_loss_is_a_mean_over_samples() -> None:
    bound = objective()
    noised = bound.corrupt(PAIRS, draw_noise(PAIRS, 0, 0, SIZE, mode_weights("t2l")))
    _, sums = bound(uniform_words, noised, noised.counts.tolist())
    summary = bound.stats.summary(sums, noised.counts)
    assert summary["loss/length"] == pytest.approx(math.log(9), rel=1e-5)
    assert "loss/text" not in summary and "loss/latent_t2l" in summary


@pytest.mark.quick
def test_a_weight_is_limited_before_its_importance() -> None:
    """So that the limit does not depend on how often a time is drawn."""
    text = MaskedDiffusion(mask_id=1, loss="elbo", masks="independent")
    t, lengths, importance = torch.tensor([0.01, 0.5]), torch.tensor([8, 8]), torch.tensor([3.0, 3.0])
    plain = text.weights(t, lengths, torch.ones(2))
    limited = text.weights(t, lengths, importance, limit=5.0)
    assert plain[0] > 5 > plain[1] and limited.tolist() == pytest.approx([15.0, 3 * float(plain[1])])
