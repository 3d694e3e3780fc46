"""Noise schedules in continuous time t in [0, 1]: 0 is data, 1 is pure noise, for both modalities.

All functions map tensors of any shape element-wise, in float32 or float64 like their input.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NoiseScheduleName = Literal["vp_cosine", "vp_linear", "vp_sigmoid", "rectified_flow"]
TimeSampling = Literal["uniform", "logit_normal", "mode"]


class NoiseSchedule(ABC):
    """z_t = alpha(t) x0 + sigma(t) epsilon, with alpha(0) = 1 and alpha(1) = 0 exactly.

    The `clock` of a schedule is an increasing function of t. As a function of the clock, z is smooth up to both ends,
    and v is its derivative. If the schedule preserves variance, the clock is the angle of (alpha, sigma), and v is the
    v of Progressive Distillation (arXiv 2202.00512, appendix D). For rectified flow the clock is t.
    """

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Return the coefficient of x0."""

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor:
        """Return the coefficient of epsilon."""

    @abstractmethod
    def clock(self, t: Tensor) -> Tensor:
        """Return the variable by which v is a derivative."""

    def snr_slope(self, t: Tensor) -> Tensor:
        """Return -SNR'(t) for SNR = alpha^2 / sigma^2 and t in (0, 1).

        The slope by the clock is 2 alpha / sigma^3, since alpha b - sigma a = 1 for the velocity (a, b).
        """
        with torch.enable_grad():
            t = t.detach().requires_grad_()
            (clock_slope,) = torch.autograd.grad(self.clock(t).sum(), t)
        return (2 * self.alpha(t) / self.sigma(t) ** 3 * clock_slope).detach()

    @abstractmethod
    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (a, b) of v = a x0 + b epsilon. All schedules here have alpha b - sigma a = 1."""


class VariancePreserving(NoiseSchedule):
    """Noise schedule with alpha^2 + sigma^2 = 1. Subclasses define alpha^2."""

    @abstractmethod
    def alpha_squared(self, t: Tensor) -> Tensor:
        """Return alpha(t)^2."""

    def alpha(self, t: Tensor) -> Tensor:
        return self.alpha_squared(t).clamp(0, 1).sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        return (1 - self.alpha_squared(t).clamp(0, 1)).sqrt()

    def clock(self, t: Tensor) -> Tensor:
        return torch.atan2(self.sigma(t), self.alpha(t))

    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -self.sigma(t), self.alpha(t)


class CosineSchedule(VariancePreserving):
    """Cosine schedule of Improved DDPM (arXiv 2102.09672, eq. 17, s = 0.008)."""

    offset = 0.008

    def alpha_squared(self, t: Tensor) -> Tensor:
        start = math.cos(self.offset / (1 + self.offset) * math.pi / 2) ** 2
        # The sine of the complement is exactly 0 at t = 1. The cosine would leave a rounding error.
        value = torch.sin((1 - t) / (1 + self.offset) * math.pi / 2) ** 2 / start
        return torch.where(t <= 0, torch.ones_like(value), value)  # in float32, 1 - 6e-8 would be a sigma of 2e-4


class LinearSchedule(VariancePreserving):
    """Linear beta from 0.1 to 20 in continuous time (arXiv 2011.13456, eq. 33).

    alpha is shifted and scaled so that alpha(1) = 0 (arXiv 2305.08891, algorithm 1): t = 1 must be pure noise, since it
    is the null condition of classifier-free guidance.
    """

    beta_start, beta_end = 0.1, 20.0

    def _log_alpha(self, t: Tensor) -> Tensor:
        return -0.25 * t**2 * (self.beta_end - self.beta_start) - 0.5 * t * self.beta_start

    def alpha_squared(self, t: Tensor) -> Tensor:
        last = self._log_alpha(torch.ones_like(t)).exp()
        return ((self._log_alpha(t).exp() - last) / (1 - last)) ** 2


class SigmoidSchedule(VariancePreserving):
    """Sigmoid schedule gamma(t) with start -3, end 3, temperature 1 (arXiv 2212.11972, algorithm 1)."""

    start, end = -3.0, 3.0

    def alpha_squared(self, t: Tensor) -> Tensor:
        first, last = 1 / (1 + math.exp(-self.start)), 1 / (1 + math.exp(-self.end))
        value = torch.sigmoid(t * (self.end - self.start) + self.start)
        gamma = (last - value) / (last - first)
        # At the ends the quotient is 0 and 1 only up to rounding.
        return torch.where(t >= 1, torch.zeros_like(gamma), torch.where(t <= 0, torch.ones_like(gamma), gamma))


class RectifiedFlow(NoiseSchedule):
    """Straight line from data to noise (arXiv 2209.03003, eq. 1)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def clock(self, t: Tensor) -> Tensor:
        return t

    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), torch.ones_like(t)


NOISE_SCHEDULES: dict[NoiseScheduleName, type[NoiseSchedule]] = {
    "vp_cosine": CosineSchedule,
    "vp_linear": LinearSchedule,
    "vp_sigmoid": SigmoidSchedule,
    "rectified_flow": RectifiedFlow,
}


def stratified_times(offset: float, strata: Tensor, count: int) -> Tensor:
    """Return float64 times on a low-discrepancy grid over the global batch (VDM, arXiv 2107.00630, appendix I.1).

    The grid has one time in each of `count` equal parts of [0, 1), always at the fraction `offset` of the part.
    `strata` holds the part of each sample, from 0 to count - 1.
    """
    return (strata.double() / count + offset) % 1.0


@dataclass(frozen=True)
class TimeSampler:
    """Maps uniform numbers to noise times by the samplers of SD3 (arXiv 2403.03206)."""

    kind: TimeSampling = "uniform"
    location: float = 0.0  # logit_normal: mean of the times' logits (m in SD3, eq. 19)
    scale: float = 1.0  # logit_normal: standard deviation of the times' logits (s in SD3, eq. 19)
    mode_scale: float = 1.29  # mode: s in SD3, eq. 20
    stratified: bool = True
    lowest: float = 0.0  # no time is below it
    shift: float = 1.0  # toward 1: sqrt(m / n) in SD3, eq. 23
    pure_noise: float = 0.0  # share of joint's samples whose time is 1, whatever `times` says, see `draw_noise`

    def times(self, u: Tensor) -> Tensor:
        """Return the times, an increasing function of the uniform numbers `u` in [0, 1]."""
        t = self._times(u).clamp_min(self.lowest)
        return t if self.shift == 1 else self.shift * t / (1 + (self.shift - 1) * t)

    def _times(self, u: Tensor) -> Tensor:
        if self.kind == "uniform":
            return u
        if self.kind == "mode":  # SD3's function of 1 - u, so that times increase with u
            return u - self.mode_scale * (torch.sin(math.pi / 2 * u) ** 2 - u)
        # The normal quantile function is infinite at 0 and 1.
        clamped = u.clamp(1e-6, 1 - 1e-6)
        return torch.sigmoid(self.location + self.scale * math.sqrt(2) * torch.erfinv(2 * clamped - 1))

    def importance(self, u: Tensor) -> Tensor:
        """Return dt/du = 1 / density(t). With this weight a mean over the times is a mean over uniform times.

        It is undefined for logit_normal, whose density is 0 at both ends, so that the weight would be unbounded.
        """
        assert self.kind != "logit_normal" and self.shift == 1
        if self.kind == "uniform":
            return torch.ones_like(u)
        return 1 + self.mode_scale * (1 - math.pi / 2 * torch.sin(math.pi * u))


UNIFORM = TimeSampler()
MIN_TEXT_TIME = 1e-3  # lower bound for independent masks, since their weight 1 / t is unbounded at 0
UNIFORM_TEXT = TimeSampler(lowest=MIN_TEXT_TIME)
MAX_MODE_SCALE = 1.75  # from 2 / (pi - 2) = 1.752 on, the times of mode sampling do not increase with u
