"""epsilon, x0 and v convert into each other and stay finite where a naive conversion divides by zero."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from mmldlm.diffusion.gaussian import ALPHA_MIN, SIGMA_MIN, LatentLoss, PredictionType
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from tests.helpers.toy_pairs import COMBINATIONS, PREDICTIONS, SCHEDULE_NAMES, gaussian

pytestmark = pytest.mark.quick

CHANNELS = 8
every_combination = pytest.mark.parametrize(("schedule", "prediction", "loss"), COMBINATIONS)


def orthogonal_pair(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x0 and epsilon [count, 3, C] in float64, both of norm sqrt(C), orthogonal as they are in high dimension."""
    generator = torch.Generator().manual_seed(seed)
    x0, other = torch.randn(2, count, 3, CHANNELS, generator=generator, dtype=torch.float64)
    x0 = F.normalize(x0, dim=-1)
    other = other - (other * x0).sum(-1, keepdim=True) * x0
    return x0 * math.sqrt(CHANNELS), F.normalize(other, dim=-1) * math.sqrt(CHANNELS)


@every_combination
def test_correct_prediction_recovers_data_and_noise(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss
) -> None:
    """A cosine-trained prediction may have any magnitude, since data and noise have known norms."""
    diffusion = gaussian(schedule, prediction, loss, CHANNELS)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    t = t[(diffusion.noise_schedule.alpha(t) > 2 * ALPHA_MIN) & (diffusion.noise_schedule.sigma(t) > 2 * SIGMA_MIN)]
    assert len(t) > 90
    x0, epsilon = orthogonal_pair(len(t))
    predicted = diffusion.target(x0, epsilon, t)
    if loss == "cosine":
        predicted = predicted * torch.logspace(-3, 3, len(t), dtype=torch.float64)[:, None, None]
    found_x0, found_epsilon = diffusion.estimates(predicted, diffusion.corrupt(x0, epsilon, t), t)
    torch.testing.assert_close(found_x0, x0, rtol=0, atol=1e-5)  # max_norm itself is 1e-6 wide
    torch.testing.assert_close(found_epsilon, epsilon, rtol=0, atol=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("first", PREDICTIONS)
@pytest.mark.parametrize("second", PREDICTIONS)
def test_predictions_convert_into_each_other(
    schedule: NoiseScheduleName, first: PredictionType, second: PredictionType
) -> None:
    """first -> (x0, epsilon) -> second -> (x0, epsilon), for predictions that are not right."""
    one, other = gaussian(schedule, first, "mse"), gaussian(schedule, second, "mse")
    one.max_norm = other.max_norm = math.inf
    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0.05, 0.9, 50, dtype=torch.float64)
    z, predicted = torch.randn(2, 50, 1, CHANNELS, generator=generator, dtype=torch.float64)
    x0, epsilon = one.estimates(predicted, z, t)
    torch.testing.assert_close(one.corrupt(x0, epsilon, t), z)
    again = other.estimates(other.target(x0, epsilon, t), z, t)
    torch.testing.assert_close(again[0], x0, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(again[1], epsilon, rtol=1e-9, atol=1e-9)


@every_combination
@pytest.mark.parametrize("bounded", [True, False])
def test_finite_at_both_ends(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss, bounded: bool
) -> None:
    diffusion = gaussian(schedule, prediction, loss, CHANNELS)
    if not bounded:
        diffusion.max_norm = math.inf
    x0, epsilon = (part.float() for part in orthogonal_pair(4))
    t = torch.tensor([0.0, 1.0, 0.0, 1.0])
    z, target = diffusion.corrupt(x0, epsilon, t), diffusion.target(x0, epsilon, t)
    for guess in (target, torch.zeros_like(target), 100 * epsilon):
        predicted = guess.clone().requires_grad_()
        losses = diffusion.losses(predicted, target)
        losses.sum().backward()
        results = [losses, predicted.grad, *diffusion.estimates(guess, z, t)]
        for sampler in ("ddim", "euler"):
            results.append(diffusion.reverse_step(guess, z, torch.ones(4), torch.full((4,), 0.9), sampler))
            results.append(diffusion.reverse_step(guess, z, torch.full((4,), 0.1), torch.zeros(4), sampler))
        assert all(bool(result.isfinite().all()) for result in results if result is not None)
    assert torch.equal(z[t == 0], x0[t == 0]) and torch.equal(z[t == 1], epsilon[t == 1])


@every_combination
def test_losses_have_their_documented_bounds(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss
) -> None:
    diffusion = gaussian(schedule, prediction, loss, CHANNELS)
    x0, epsilon = (part.float() for part in orthogonal_pair(16))
    target = diffusion.target(x0, epsilon, torch.linspace(0, 1, 16))
    assert diffusion.losses(target, target).abs().max() < 1e-6
    wrong = diffusion.losses(-target, target)
    assert wrong.shape == (16,)
    expected = {"cosine": 2.0, "mse": None, "normalized_mse": 4.0, "huber": None}[loss]
    if expected is None:
        assert (wrong > 0).all()
    else:
        torch.testing.assert_close(wrong, torch.full((16,), expected))


@every_combination
def test_zero_prediction_has_a_moderate_gradient(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss
) -> None:
    """Or it alone would fill the first clipped step, and Adam's second moments for hundreds more."""
    diffusion = gaussian(schedule, prediction, loss, CHANNELS)
    x0, epsilon = (part.float() for part in orthogonal_pair(16))
    target = diffusion.target(x0, epsilon, torch.linspace(0, 1, 16))
    predicted = torch.zeros_like(target).requires_grad_()
    diffusion.losses(predicted, target).sum().backward()
    assert predicted.grad is not None
    assert 0.01 < predicted.grad.norm(dim=-1).min() <= predicted.grad.norm(dim=-1).max() < 10


def test_estimates_are_never_longer_than_the_data() -> None:
    for schedule, prediction, loss in COMBINATIONS:
        diffusion = gaussian(schedule, prediction, loss, CHANNELS)
        z = 10 * torch.randn(32, 2, CHANNELS, generator=torch.Generator().manual_seed(0))
        x0, _ = diffusion.estimates(-z, z, torch.linspace(0, 1, 32))
        assert x0.norm(dim=-1).max() <= diffusion.max_norm * (1 + 1e-5)


def test_only_cosine_training_starts_on_the_sphere() -> None:
    noise = torch.randn(5, 2, CHANNELS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gaussian("vp_cosine", "epsilon", "mse").prior(noise), noise)
    start = gaussian("vp_cosine", "epsilon", "cosine").prior(noise)
    torch.testing.assert_close(start.norm(dim=-1), torch.full((5, 2), math.sqrt(CHANNELS)))
    torch.testing.assert_close(F.cosine_similarity(start, noise, dim=-1), torch.ones(5, 2))
