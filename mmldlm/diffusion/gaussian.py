"""Latents: Gaussian diffusion in continuous time; corruption, targets, conversions, losses, reverse steps.

Shapes: x0, epsilon, z, v and every prediction [B, M, C]; t [B]. Latents have unit RMS, so x0 and epsilon
both have norm near sqrt(C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.diffusion.schedule import MOST_MODE_SCALE, PATHS, Process, TimeSampler, TimeSampling, check_sampler
from mmldlm.settings.fields import setting

PredictionType = Literal["epsilon", "x0", "v"]
LatentLoss = Literal["cosine", "mse", "normalized_mse", "huber"]
LatentSampler = Literal["ddim", "euler"]

ALPHA_MIN = 1e-3  # epsilon says nothing of x0 where alpha = 0; the estimate is damped there, never divided by 0
SIGMA_MIN = 1e-3


@dataclass(frozen=True)
class LatentConfig:
    process: Process = setting("vp_cosine", "noising path of the latents")
    prediction: PredictionType = setting("x0", "what the network predicts of them")
    time_sampling: TimeSampling = setting(
        "uniform", "distribution of t_latent in training; logit_normal, mode: more of the middle"
    )
    location: float = setting(0.0, "logit_normal: mean of the logit of t_latent; above 0: more noise")
    scale: float = setting(1.0, "logit_normal: standard deviation of the logit of t_latent", above=0)
    mode_scale: float = setting(
        1.29, "mode: 0 is uniform, more is more of the middle, less of the ends", above=-1, below=MOST_MODE_SCALE
    )
    stratified: bool = setting(
        True, "t_latent from a low-discrepancy grid over the global batch; false: each sample's by itself"
    )

    def __post_init__(self) -> None:
        check_sampler(self.sampler)

    @property
    def has_skip(self) -> bool:
        """Whether the prediction gets a learned share of the noised latent; for x0 that is a shortcut."""
        return self.prediction != "x0"

    @property
    def sampler(self) -> TimeSampler:
        return TimeSampler(self.time_sampling, self.location, self.scale, self.mode_scale, self.stratified)


def per_sample(t_B: Tensor, like: Tensor) -> Tensor:
    return t_B.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


class GaussianDiffusion:
    """One path and one parametrization, behind the loss, the samplers and the evaluation alike."""

    def __init__(self, config: LatentConfig, loss: LatentLoss, max_norm: float = math.inf, huber_delta: float = 1.0):
        """`max_norm`: norm that no x0 estimate exceeds; the largest of the training data."""
        self.path = PATHS[config.process]()
        self.prediction = config.prediction
        self.loss_kind = loss
        self.max_norm = max_norm
        self.huber_delta = huber_delta

    def corrupt(self, x0: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """z_t = alpha x0 + sigma epsilon."""
        t = per_sample(t, x0)
        return self.path.alpha(t) * x0 + self.path.sigma(t) * epsilon

    def target(self, x0: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """What a perfect network predicts."""
        if self.prediction == "x0":
            return x0
        if self.prediction == "epsilon":
            return epsilon
        a, b = self.path.velocity(per_sample(t, x0))
        return a * x0 + b * epsilon

    def losses(self, predicted: Tensor, target: Tensor) -> Tensor:
        """[B]: the configured loss of each sample, in float32, mean over its latent tokens and channels."""
        predicted, target = predicted.float(), target.float()
        if self.loss_kind == "cosine":
            # Lengths below eps count as eps: an untrained network predicts 0, where the gradient is 1 / eps.
            return (1 - F.cosine_similarity(predicted, target, dim=-1, eps=0.1)).mean(-1)
        if self.loss_kind == "huber":
            return F.huber_loss(predicted, target, reduction="none", delta=self.huber_delta).flatten(1).mean(1)
        squared = (predicted - target).square().flatten(1).mean(1)
        if self.loss_kind == "mse":
            return squared
        return squared / target.square().flatten(1).mean(1).clamp_min(1e-6)

    def min_snr_weight(self, t: Tensor, gamma: float) -> Tensor:
        """[B]: min(SNR, gamma) x (error of x0 over error of the prediction)^2, SNR = alpha^2 / sigma^2.

        Min-SNR (arXiv 2303.09556, section 3.4) weighs squared errors of x0 so. Of epsilon it is min(1, gamma / SNR),
        of v min(SNR, gamma) sigma^2, which is the paper's min(SNR, gamma) / (SNR + 1) on variance-preserving paths.
        """
        signal, noise = self.path.alpha(t).square(), self.path.sigma(t).square()
        if self.prediction == "v":
            return torch.minimum(signal, gamma * noise)
        if self.prediction == "epsilon":
            return (gamma * noise / signal.clamp_min(ALPHA_MIN**2)).clamp_max(1)
        return (signal / noise.clamp_min(SIGMA_MIN**2)).clamp_max(gamma)

    def prior(self, noise: Tensor) -> Tensor:
        """z at t = 1 from standard normal noise.

        A network trained by cosine says where epsilon points, and sampling takes it to be sqrt(C) long. A
        start of another length would be off by a factor that every step stretches with alpha(s) / alpha(t).
        """
        if self.loss_kind != "cosine":
            return noise
        return F.normalize(noise, dim=-1) * math.sqrt(noise.shape[-1])

    # --- from a prediction back to data ---------------------------------------------------------------

    def estimates(self, predicted: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(x0, epsilon) that a prediction at z_t stands for; finite for every t in [0, 1].

        A cosine-trained prediction has a direction only: it is put back on the sphere where its target
        lies. x0 estimates longer than any datum are shortened to `max_norm`, as image models clip theirs.
        """
        t = per_sample(t, z)
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        predicted = self._with_target_norm(predicted, t)
        if self.prediction == "epsilon":
            x0 = (z - sigma * predicted) / alpha.clamp_min(ALPHA_MIN)
        elif self.prediction == "x0":
            x0 = predicted
        else:
            _, b = self.path.velocity(t)
            x0 = b * z - sigma * predicted
        norm = x0.norm(dim=-1, keepdim=True)
        x0 = x0 * (self.max_norm / norm.clamp_min(self.max_norm) if math.isfinite(self.max_norm) else 1.0)
        return x0, (z - alpha * x0) / sigma.clamp_min(SIGMA_MIN)

    def _with_target_norm(self, predicted: Tensor, t: Tensor) -> Tensor:
        """Put a cosine-trained prediction on the sphere of its targets; others are returned as they are.

        `t` broadcasts against `predicted`.
        """
        if self.loss_kind != "cosine":
            return predicted
        norm = math.sqrt(predicted.shape[-1])
        if self.prediction != "v":
            return F.normalize(predicted, dim=-1) * norm
        a, b = self.path.velocity(t)
        return F.normalize(predicted, dim=-1) * norm * (a.square() + b.square()).sqrt()

    def guide(self, conditional: Tensor, unconditional: Tensor, t: Tensor, scale: float) -> Tensor:
        """Extrapolate from the unconditional through the conditional prediction (arXiv 2207.12598, eq. 6).

        The cosine loss leaves lengths open, and extrapolating between raw predictions of different lengths would act
        with another scale than the one asked for. So both are put on the sphere of their targets before.
        """
        t = per_sample(t, conditional)
        conditional, unconditional = (self._with_target_norm(each, t) for each in (conditional, unconditional))
        return unconditional + scale * (conditional - unconditional)

    def reverse_step(self, predicted: Tensor, z: Tensor, t: Tensor, s: Tensor, sampler: LatentSampler) -> Tensor:
        """z at time s < t. `ddim`: arXiv 2010.02502, eq. 12 with eta = 0; `euler`: along v in the path's clock."""
        x0, epsilon = self.estimates(predicted, z, t)
        t, s = per_sample(t, z), per_sample(s, z)
        if sampler == "ddim":
            return self.path.alpha(s) * x0 + self.path.sigma(s) * epsilon
        a, b = self.path.velocity(t)
        return z + (self.path.clock(s) - self.path.clock(t)) * (a * x0 + b * epsilon)
