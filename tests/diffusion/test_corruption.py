"""Marginals of both forward processes match alpha, and reverse steps of the text preserve them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mmldlm.diffusion.decoding import AncestralDecoder
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from tests.helpers.toy_pairs import MASK, SCHEDULE_NAMES, gaussian

pytestmark = pytest.mark.quick

SIGMAS = 4.5  # bound on a Monte-Carlo error, in standard deviations of the estimate


def share_bound(share: float, count: int) -> float:
    return SIGMAS * (share * (1 - share) / count) ** 0.5


@pytest.mark.parametrize("t", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_share_of_masked_tokens_is_one_minus_alpha(t: float) -> None:
    count = 50_000
    text, generator = MaskedDiffusion(MASK, "elbo"), torch.Generator().manual_seed(0)
    times = torch.tensor([t, 0.3])  # the second sample must not matter to the first
    sample = torch.tensor([0, 1]).repeat_interleave(count)
    masked = text.token_mask(torch.rand(2 * count, generator=generator), times, sample)
    for part, share in zip(masked.split(count), times.tolist(), strict=True):
        assert abs(float(part.double().mean()) - share) <= share_bound(share, count)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("t", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_noised_latents_have_mean_alpha_x0_and_deviation_sigma(schedule: NoiseScheduleName, t: float) -> None:
    diffusion, count = gaussian(schedule, "v", "mse"), 100_000
    generator = torch.Generator().manual_seed(0)
    datum = torch.randn(1, 1, 2, generator=generator)
    epsilon = torch.randn(count, 1, 2, generator=generator)
    z = diffusion.corrupt(datum.expand(count, 1, 2), epsilon, torch.full((count,), t)).double()
    alpha, sigma = (
        f(torch.tensor(t, dtype=torch.float64))
        for f in (diffusion.noise_schedule.alpha, diffusion.noise_schedule.sigma)
    )
    mean_error = (z.mean(0) - alpha * datum[0]).abs().max()
    deviation_error = (z.std(0) - sigma).abs().max()
    assert mean_error <= SIGMAS * sigma / count**0.5 + 1e-6
    assert deviation_error <= SIGMAS * sigma / (2 * count) ** 0.5 + 1e-6


@pytest.mark.parametrize("remask", [0.0, 0.3, 1.0])
def test_ancestral_steps_keep_the_masked_share(remask: float) -> None:
    """Every reverse step lands on the forward marginal."""
    count, times = 50_000, torch.linspace(1, 0, 9).tolist()
    uniforms = torch.rand(8, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    decoder = AncestralDecoder(MaskedDiffusion(MASK, "elbo"), times, uniforms, remask, torch.device("cpu"))
    tokens, again = torch.full((count,), MASK), 0
    for step, s in enumerate(times[1:]):
        before, rows = tokens, decoder.rows(step, tokens)
        assert (before[rows] == MASK).all()
        tokens = decoder.update(step, tokens, rows, torch.zeros_like(rows), torch.zeros(len(rows)))
        assert abs(float((tokens == MASK).double().mean()) - s) <= share_bound(s, count) + 1e-9
        again += int(((tokens == MASK) & (before != MASK)).sum())
    assert not (tokens == MASK).any()
    assert (again > 0) == (remask > 0)


@pytest.mark.parametrize("remask", [0.0, 0.5, 1.0])
def test_reverse_probabilities_are_probabilities(remask: float) -> None:
    text = MaskedDiffusion(MASK, "elbo")
    for t, s in pairwise(torch.linspace(1, 0, 33).tolist()):
        write, mask_again = text.unmask_probability(t, s, remask)
        assert -1e-9 <= write <= 1 + 1e-9 and 0 <= mask_again <= 1
        assert t * (1 - write) + (1 - t) * mask_again == pytest.approx(s, abs=1e-9)
