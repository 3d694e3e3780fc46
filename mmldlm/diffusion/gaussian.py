"""Gaussian diffusion of latents in continuous time: corruption, targets, conversions, losses, reverse steps.

Shapes: x0, epsilon, z, v and all predictions are [B, M, C], and t is [B]. Latents have unit RMS: norms near sqrt(C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.diffusion.noise_schedule import (
    MAX_MODE_SCALE,
    NOISE_SCHEDULES,
    NoiseScheduleName,
    TimeSampler,
    TimeSampling,
)
from mmldlm.settings.declaration import require_effect, setting

PredictionType = Literal["epsilon", "x0", "v"]
LatentLoss = Literal["cosine", "mse", "normalized_mse", "huber"]
LatentSampler = Literal["ddim", "euler"]

# Lower bounds of divisors. At alpha = 0 epsilon does not determine x0, and the bound damps the estimate of x0.
ALPHA_MIN = 1e-3
SIGMA_MIN = 1e-3
SHIFT_NUMBERS = 64  # noise times are shifted if the latents of a text have more numbers than this


@dataclass(frozen=True)
class LatentConfig:
    """Diffusion process of the latents."""

    noise_schedule: NoiseScheduleName = setting("vp_cosine", "noise schedule of the latents")
    prediction: PredictionType = setting(
        "x0",
        "prediction type of the latent head",
        advice="x0 learns t2l within the first hundreds of steps. epsilon and v need longer runs",
    )
    time_sampling: TimeSampling = setting(
        "uniform", "distribution of t_latent in training. logit_normal and mode favor the middle"
    )
    location: float = setting(0.0, "logit_normal: mean of the logit of t_latent. Larger values mean more noise")
    scale: float = setting(1.0, "logit_normal: standard deviation of the logit of t_latent", above=0)
    mode_scale: float = setting(
        1.29, "mode: 0 is uniform, larger values favor the middle over the ends", above=-1, below=MAX_MODE_SCALE
    )
    time_shift: float | None = setting(
        None,
        "s in t_latent -> s t_latent / (1 + (s - 1) t_latent). Larger values move the drawn times toward noise, "
        "since latents with more numbers need more noise before they are hidden. null: sqrt(latent tokens x "
        "channels / 64), at least 1",
        above=0,
    )
    pure_noise: float = setting(
        0.0,
        "share of joint's samples that train at t_latent = 1, whatever the distribution of the others. They train the "
        "text without its latent, from which `sampling.joint_order: text_first` generates",
        at_least=0,
        at_most=1,
    )
    stratified: bool = setting(
        True, "true: t_latent from a low-discrepancy grid over the global batch. false: independent draws"
    )

    def __post_init__(self) -> None:
        require_effect(self, "location", "time_sampling", "logit_normal")
        require_effect(self, "scale", "time_sampling", "logit_normal")
        require_effect(self, "mode_scale", "time_sampling", "mode")

    @property
    def has_skip(self) -> bool:
        """Return whether the network adds a learned multiple of the noised latent, which for x0 would be a shortcut."""
        return self.prediction != "x0"

    @property
    def sampler(self) -> TimeSampler:
        """Distribution of t_latent."""
        distribution = self.time_sampling, self.location, self.scale, self.mode_scale
        shift = self.time_shift or 1.0
        return TimeSampler(*distribution, self.stratified, shift=shift, pure_noise=self.pure_noise)

    def resolve(self, numbers: int) -> LatentConfig:
        """Return the config with the default shift for texts whose latents have `numbers` = tokens x channels."""
        shift = max(1.0, math.sqrt(numbers / SHIFT_NUMBERS)) if self.time_shift is None else self.time_shift
        return replace(self, time_shift=shift)


def per_sample(t_B: Tensor, like: Tensor) -> Tensor:
    """Return `t_B` as [B, 1, ...], to broadcast against `like` [B, ...], in its type."""
    return t_B.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


class GaussianDiffusion:
    """Diffusion with one noise schedule and one prediction type. The loss, the samplers and the evaluation use it.

    Args:
        max_norm: Upper bound of the norm of x0 estimates, for example the largest norm in the training data.
        huber_delta: Error from which on the Huber loss grows linearly.
    """

    def __init__(self, config: LatentConfig, loss: LatentLoss, max_norm: float = math.inf, huber_delta: float = 1.0):
        self.noise_schedule = NOISE_SCHEDULES[config.noise_schedule]()
        self.sampler, self.prediction_type = config.sampler, config.prediction
        self.loss_kind, self.max_norm, self.huber_delta = loss, max_norm, huber_delta

    def corrupt(self, x0: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """Return z_t = alpha x0 + sigma epsilon."""
        t = per_sample(t, x0)
        return self.noise_schedule.alpha(t) * x0 + self.noise_schedule.sigma(t) * epsilon

    def target(self, x0: Tensor, epsilon: Tensor, t: Tensor) -> Tensor:
        """Return the target of the prediction: x0, epsilon or v."""
        if self.prediction_type == "x0":
            return x0
        if self.prediction_type == "epsilon":
            return epsilon
        a, b = self.noise_schedule.velocity(per_sample(t, x0))
        return a * x0 + b * epsilon

    def losses(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample [B] in float32, a mean over its latent tokens and channels."""
        predicted, target = predicted.float(), target.float()
        if self.loss_kind == "cosine":
            # Norms below eps count as eps: the initial prediction is 0, and the gradient there is 1 / eps.
            return (1 - F.cosine_similarity(predicted, target, dim=-1, eps=0.1)).mean(-1)
        if self.loss_kind == "huber":
            return F.huber_loss(predicted, target, reduction="none", delta=self.huber_delta).flatten(1).mean(1)
        squared = (predicted - target).square().flatten(1).mean(1)
        if self.loss_kind == "mse":
            return squared
        return squared / target.square().flatten(1).mean(1).clamp_min(1e-6)

    def min_snr_weight(self, t: Tensor, gamma: float) -> Tensor:
        """Return [B] min(SNR, gamma) x (error of x0 / error of the prediction)^2, with SNR = alpha^2 / sigma^2.

        This is the weight of Min-SNR for squared errors of x0 (arXiv 2303.09556, section 3.4), converted to the
        prediction type: min(1, gamma / SNR) for epsilon and min(SNR, gamma) sigma^2 for v. The latter is the paper's
        min(SNR, gamma) / (SNR + 1) on schedules that preserve variance.
        """
        signal, noise = self.noise_schedule.alpha(t).square(), self.noise_schedule.sigma(t).square()
        if self.prediction_type == "v":
            return torch.minimum(signal, gamma * noise)
        if self.prediction_type == "epsilon":
            return (gamma * noise / signal.clamp_min(ALPHA_MIN**2)).clamp_max(1)
        return (signal / noise.clamp_min(SIGMA_MIN**2)).clamp_max(gamma)

    def prior(self, noise: Tensor) -> Tensor:
        """Return z at t = 1 from standard normal noise.

        With the cosine loss the network predicts the direction of epsilon alone, and sampling assumes that its norm is
        sqrt(C). If the initial z had another norm, each step would multiply that error by alpha(s) / alpha(t).
        """
        if self.loss_kind != "cosine":
            return noise
        return F.normalize(noise, dim=-1) * math.sqrt(noise.shape[-1])

    # --- from a prediction back to data ---------------------------------------------------------------

    def estimates(self, predicted: Tensor, z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the x0 and epsilon that a prediction at z_t implies. Both are finite for every t in [0, 1].

        With the cosine loss a prediction is only a direction, so we scale it to the norm of its target. We clip x0
        estimates to the norm `max_norm`, as image models clip estimates to the range of pixels.
        """
        t = per_sample(t, z)
        alpha, sigma = self.noise_schedule.alpha(t), self.noise_schedule.sigma(t)
        predicted = self._with_target_norm(predicted, t)
        if self.prediction_type == "epsilon":
            x0 = (z - sigma * predicted) / alpha.clamp_min(ALPHA_MIN)
        elif self.prediction_type == "x0":
            x0 = predicted
        else:
            _, b = self.noise_schedule.velocity(t)
            # Follows from alpha b - sigma a = 1.
            x0 = b * z - sigma * predicted
        norm = x0.norm(dim=-1, keepdim=True)
        x0 = x0 * (self.max_norm / norm.clamp_min(self.max_norm) if math.isfinite(self.max_norm) else 1.0)
        # Computed from the clipped x0, so that alpha x0 + sigma epsilon is z again.
        return x0, (z - alpha * x0) / sigma.clamp_min(SIGMA_MIN)

    def _with_target_norm(self, predicted: Tensor, t: Tensor) -> Tensor:
        """Scale a cosine-trained prediction to the norm of its target, and return any other unchanged."""
        if self.loss_kind != "cosine":
            return predicted
        norm = math.sqrt(predicted.shape[-1])
        if self.prediction_type != "v":
            return F.normalize(predicted, dim=-1) * norm
        a, b = self.noise_schedule.velocity(t)
        return F.normalize(predicted, dim=-1) * norm * (a.square() + b.square()).sqrt()

    def guide(self, conditional: Tensor, unconditional: Tensor, t: Tensor, scale: float) -> Tensor:
        """Extrapolate from the unconditional through the conditional prediction (arXiv 2207.12598, eq. 6).

        The cosine loss does not determine norms, and extrapolation between raw predictions of different norms would act
        like another guidance scale. So we first scale both predictions to the norms of their targets.
        """
        t = per_sample(t, conditional)
        conditional, unconditional = (self._with_target_norm(pred, t) for pred in (conditional, unconditional))
        return unconditional + scale * (conditional - unconditional)

    def reverse_step(self, predicted: Tensor, z: Tensor, t: Tensor, s: Tensor, sampler: LatentSampler) -> Tensor:
        """Return z at time s < t.

        `ddim`: arXiv 2010.02502, eq. 12 with eta = 0. `euler`: a step along v in the schedule's clock.
        """
        x0, epsilon = self.estimates(predicted, z, t)
        t, s = per_sample(t, z), per_sample(s, z)
        if sampler == "ddim":
            return self.noise_schedule.alpha(s) * x0 + self.noise_schedule.sigma(s) * epsilon
        a, b = self.noise_schedule.velocity(t)
        return z + (self.noise_schedule.clock(s) - self.noise_schedule.clock(t)) * (a * x0 + b * epsilon)
