"""What the exact minimizer of each latent loss samples: the data's distribution under mse, another under cosine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.diffusion.gaussian import LatentLoss, PredictionType
from mmldlm.evaluation.statistics import frechet_distance
from tests.helpers.toy_pairs import gaussian

CHANNELS, SAMPLES, STEPS = 16, 1000, 20


@pytest.fixture(scope="module")
def data() -> Tensor:
    """Latents of nearly equal norms and unequal channels, as an encoder's are, standardized."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, CHANNELS, generator=draw) * torch.linspace(2, 0.3, CHANNELS)
    points = F.normalize(points, dim=-1)
    points = points - points.mean(0)
    return points / points.square().mean().sqrt()


def minimizer(data: Tensor, z: Tensor, t: Tensor, prediction: PredictionType, loss: LatentLoss) -> Tensor:
    """Minimize the expected loss over the posterior of the data given z_t, for predictions [n, 1, C]."""
    process = gaussian("vp_cosine", prediction, loss, CHANNELS)
    alpha, sigma = (float(each) for each in (process.noise_schedule.alpha(t[:1]), process.noise_schedule.sigma(t[:1])))
    epsilon = (z - alpha * data) / max(sigma, 1e-4)  # [n, data, C]
    posterior = (-0.5 * epsilon.square().sum(-1)).softmax(-1)
    points = data.expand(len(z), -1, -1)
    targets = process.target(points, epsilon, t)
    if loss == "cosine":
        targets = F.normalize(targets, dim=-1)  # the mean direction has the largest mean cosine
    return (posterior[..., None] * targets).sum(1, keepdim=True)


def sampled_distance(data: Tensor, prediction: PredictionType, loss: LatentLoss) -> float:
    process = gaussian("vp_cosine", prediction, loss, CHANNELS)
    process.max_norm = float(data.norm(dim=-1).max())
    z = process.prior(torch.randn(SAMPLES, 1, CHANNELS, generator=torch.Generator().manual_seed(1)))
    times = torch.linspace(1, 0, STEPS + 1)
    for now, after in pairwise(times):
        t, s = now.expand(SAMPLES), after.expand(SAMPLES)
        parts = zip(z.split(100), t.split(100), strict=True)
        predicted = torch.cat([minimizer(data, z_part, t_part, prediction, loss) for z_part, t_part in parts])
        z = process.reverse_step(predicted, z, t, s, "ddim")
    return frechet_distance(z[:, 0].numpy(), data.numpy())


@pytest.mark.parametrize("prediction", ["x0", "v", "epsilon"])
def test_mse_samples_the_data_and_cosine_only_by_epsilon(data: Tensor, prediction: PredictionType) -> None:
    noise = frechet_distance(np.random.default_rng(0).standard_normal(data.shape), data.numpy())
    mse, cosine = (sampled_distance(data, prediction, loss) for loss in ("mse", "cosine"))
    assert mse < 0.05 * noise
    assert (cosine > 2 * mse) == (prediction != "epsilon"), (mse, cosine)
