"""alpha, sigma and velocity of every noise schedule of latents, the text schedule, and stratified times."""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise_schedule import NOISE_SCHEDULES, NoiseSchedule, TimeSampler, stratified_times
from tests.helpers.toy_pairs import SCHEDULE_NAMES

pytestmark = pytest.mark.quick

GRID = torch.linspace(0, 1, 2001, dtype=torch.float64)
INSIDE = torch.linspace(0.01, 0.99, 197, dtype=torch.float64)


@pytest.fixture(params=SCHEDULE_NAMES)
def schedule(request: pytest.FixtureRequest) -> NoiseSchedule:
    return NOISE_SCHEDULES[request.param]()


def test_every_name_has_a_noise_schedule() -> None:
    assert set(NOISE_SCHEDULES) == set(SCHEDULE_NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_endpoints_are_data_and_noise(schedule: NoiseSchedule, dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    assert schedule.alpha(ends).tolist() == [1, 0]
    assert schedule.sigma(ends).tolist() == [0, 1]


def test_noise_rises_and_signal_falls(schedule: NoiseSchedule) -> None:
    assert (schedule.alpha(GRID).diff() < 0).all()
    assert (schedule.sigma(GRID).diff() > 0).all()
    assert (schedule.clock(GRID).diff() > 0).all()


def test_variance_preserving_schedules_preserve_variance(schedule: NoiseSchedule) -> None:
    total = schedule.alpha(GRID) ** 2 + schedule.sigma(GRID) ** 2
    flow = isinstance(schedule, NOISE_SCHEDULES["rectified_flow"])
    torch.testing.assert_close(total, GRID**2 + (1 - GRID) ** 2 if flow else torch.ones_like(GRID))


def test_velocity_is_the_time_derivative(schedule: NoiseSchedule) -> None:
    step = 1e-6
    later, earlier = INSIDE + step, INSIDE - step
    ticks = schedule.clock(later) - schedule.clock(earlier)
    a, b = schedule.velocity(INSIDE)
    torch.testing.assert_close(a, (schedule.alpha(later) - schedule.alpha(earlier)) / ticks, rtol=0, atol=1e-7)
    torch.testing.assert_close(b, (schedule.sigma(later) - schedule.sigma(earlier)) / ticks, rtol=0, atol=1e-7)


def test_slope_of_the_signal_to_noise_ratio(schedule: NoiseSchedule) -> None:
    step = 1e-6
    earlier, later = ((schedule.alpha(t) / schedule.sigma(t)) ** 2 for t in (INSIDE - step, INSIDE + step))
    torch.testing.assert_close(schedule.snr_slope(INSIDE), (earlier - later) / (2 * step), rtol=1e-6, atol=1e-8)


def test_velocity_and_state_determine_data_and_noise(schedule: NoiseSchedule) -> None:
    a, b = schedule.velocity(GRID)
    torch.testing.assert_close(schedule.alpha(GRID) * b - schedule.sigma(GRID) * a, torch.ones_like(GRID))


def test_elbo_weight_is_minus_alpha_prime_over_masked_share() -> None:
    text = MaskedDiffusion(0, "elbo", "independent")
    torch.testing.assert_close(text.weights(INSIDE, INSIDE, torch.ones_like(INSIDE)), 1 / INSIDE)  # alpha is 1 - t
    assert text.weights(torch.zeros(1), torch.ones(1), torch.ones(1)).isfinite().all()


@pytest.mark.parametrize("offset", [0.0, 0.123, 0.999])
def test_stratified_times(offset: float) -> None:
    count = 64
    strata = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    times = stratified_times(offset, strata, count)
    assert times.min() >= 0 and times.max() < 1
    assert (times * count).long().sort().values.tolist() == list(range(count))


def test_logit_normal_times_have_its_quantiles() -> None:
    uniform = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    logits = torch.logit(TimeSampler("logit_normal").times(uniform)[1:])
    normal = torch.distributions.Normal(0.0, 1.0).icdf(uniform[1:])
    torch.testing.assert_close(logits, normal, rtol=0, atol=1e-6)
    assert TimeSampler("logit_normal").times(torch.tensor([0.0, 1.0])).isfinite().all()
    assert math.isclose(float(TimeSampler().times(torch.tensor(0.3))), 0.3, rel_tol=1e-6)
