"""alpha, sigma and velocity of every latent process, the text schedule, and stratified times."""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.schedule import PATHS, LatentPath, TimeSampler, stratified_times
from tests.helpers.toy_pairs import PROCESSES

pytestmark = pytest.mark.quick

GRID = torch.linspace(0, 1, 2001, dtype=torch.float64)
INSIDE = torch.linspace(0.01, 0.99, 197, dtype=torch.float64)


@pytest.fixture(params=PROCESSES)
def path(request: pytest.FixtureRequest) -> LatentPath:
    return PATHS[request.param]()


def test_every_process_has_a_path() -> None:
    assert set(PATHS) == set(PROCESSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_endpoints_are_data_and_noise(path: LatentPath, dtype: torch.dtype) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    assert path.alpha(ends).tolist() == [1, 0]
    assert path.sigma(ends).tolist() == [0, 1]


def test_noise_rises_and_signal_falls(path: LatentPath) -> None:
    assert (path.alpha(GRID).diff() < 0).all()
    assert (path.sigma(GRID).diff() > 0).all()
    assert (path.clock(GRID).diff() > 0).all()


def test_variance_preserving_paths_preserve_variance(path: LatentPath) -> None:
    total = path.alpha(GRID) ** 2 + path.sigma(GRID) ** 2
    flow = isinstance(path, PATHS["rectified_flow"])
    torch.testing.assert_close(total, GRID**2 + (1 - GRID) ** 2 if flow else torch.ones_like(GRID))


def test_velocity_is_the_time_derivative(path: LatentPath) -> None:
    step = 1e-6
    later, earlier = INSIDE + step, INSIDE - step
    ticks = path.clock(later) - path.clock(earlier)
    a, b = path.velocity(INSIDE)
    torch.testing.assert_close(a, (path.alpha(later) - path.alpha(earlier)) / ticks, rtol=0, atol=1e-7)
    torch.testing.assert_close(b, (path.sigma(later) - path.sigma(earlier)) / ticks, rtol=0, atol=1e-7)


def test_slope_of_the_signal_to_noise_ratio(path: LatentPath) -> None:
    step = 1e-6
    earlier, later = ((path.alpha(t) / path.sigma(t)) ** 2 for t in (INSIDE - step, INSIDE + step))
    torch.testing.assert_close(path.snr_slope(INSIDE), (earlier - later) / (2 * step), rtol=1e-6, atol=1e-8)


def test_velocity_and_state_determine_data_and_noise(path: LatentPath) -> None:
    a, b = path.velocity(GRID)
    torch.testing.assert_close(path.alpha(GRID) * b - path.sigma(GRID) * a, torch.ones_like(GRID))


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
