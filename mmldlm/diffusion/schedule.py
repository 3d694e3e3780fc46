"""Noise levels as functions of continuous time t in [0, 1]: 0 is data, 1 is pure noise, for both modalities.

Every function takes a tensor of any shape and gives the same shape, in float32 or float64 as it came.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Process = Literal["vp_cosine", "vp_linear", "vp_sigmoid", "rectified_flow"]
TimeSampling = Literal["uniform", "logit_normal", "mode"]


class LatentPath(ABC):
    """z_t = alpha(t) x0 + sigma(t) epsilon, with alpha(0) = 1 and alpha(1) = 0 exactly.

    A path has a `clock`, a rising function of t in which it is smooth to its ends; v is the path's
    derivative by its clock. For variance-preserving paths the clock is the angle of (alpha, sigma), and v
    is that of Progressive Distillation (arXiv 2202.00512, appendix D); for rectified flow it is t itself.
    """

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def clock(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(a, b) of v = a x0 + b epsilon. For every path here alpha b - sigma a = 1."""


class VariancePreserving(LatentPath):
    """alpha^2 + sigma^2 = 1; a subclass gives alpha^2."""

    @abstractmethod
    def alpha_squared(self, t: Tensor) -> Tensor: ...

    def alpha(self, t: Tensor) -> Tensor:
        return self.alpha_squared(t).clamp(0, 1).sqrt()

    def sigma(self, t: Tensor) -> Tensor:
        return (1 - self.alpha_squared(t).clamp(0, 1)).sqrt()

    def clock(self, t: Tensor) -> Tensor:
        return torch.atan2(self.sigma(t), self.alpha(t))

    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -self.sigma(t), self.alpha(t)


class CosinePath(VariancePreserving):
    """Improved DDPM, arXiv 2102.09672, eq. 17, with s = 0.008."""

    offset = 0.008

    def alpha_squared(self, t: Tensor) -> Tensor:
        start = math.cos(self.offset / (1 + self.offset) * math.pi / 2) ** 2
        # sin of the complement: exactly 0 at t = 1, where the cosine would leave a rounding error.
        now = torch.sin((1 - t) / (1 + self.offset) * math.pi / 2) ** 2 / start
        return torch.where(t <= 0, torch.ones_like(now), now)  # 1 - 6e-8 in float32 would be a sigma of 2e-4


class LinearPath(VariancePreserving):
    """Linear beta from 0.1 to 20 in continuous time (arXiv 2011.13456, eq. 33), with alpha shifted and scaled so
    that alpha(1) = 0 (arXiv 2305.08891, algorithm 1): t = 1 must be pure noise, for it is the null condition."""

    beta_start, beta_end = 0.1, 20.0

    def _log_alpha(self, t: Tensor) -> Tensor:
        return -0.25 * t**2 * (self.beta_end - self.beta_start) - 0.5 * t * self.beta_start

    def alpha_squared(self, t: Tensor) -> Tensor:
        last = self._log_alpha(torch.ones_like(t)).exp()
        return ((self._log_alpha(t).exp() - last) / (1 - last)) ** 2


class SigmoidPath(VariancePreserving):
    """Sigmoid gamma(t) with start -3, end 3, temperature 1 (arXiv 2212.11972, algorithm 1)."""

    start, end = -3.0, 3.0

    def alpha_squared(self, t: Tensor) -> Tensor:
        first, last = 1 / (1 + math.exp(-self.start)), 1 / (1 + math.exp(-self.end))
        now = torch.sigmoid(t * (self.end - self.start) + self.start)
        gamma = (last - now) / (last - first)
        # The quotient is 0 and 1 at the ends only up to rounding.
        return torch.where(t >= 1, torch.zeros_like(gamma), torch.where(t <= 0, torch.ones_like(gamma), gamma))


class RectifiedFlow(LatentPath):
    """A straight line from data to noise (arXiv 2209.03003, eq. 1)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def clock(self, t: Tensor) -> Tensor:
        return t

    def velocity(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(t), torch.ones_like(t)


PATHS: dict[str, type[LatentPath]] = {
    "vp_cosine": CosinePath,
    "vp_linear": LinearPath,
    "vp_sigmoid": SigmoidPath,
    "rectified_flow": RectifiedFlow,
}


class LogLinear:
    """Masking schedule of text: alpha(t) = 1 - t (MDLM, arXiv 2406.07524, section 3.5)."""

    t_min = 1e-3  # the ELBO weight 1 / t is unbounded at 0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def elbo_weight(self, t: Tensor) -> Tensor:
        """-alpha'(t) / (1 - alpha(t)) (MDLM, eq. 10)."""
        return 1 / t.clamp_min(self.t_min)


def stratified_times(offset: float, strata: Tensor, count: int) -> Tensor:
    """float64: one time in each of `count` equal parts of [0, 1), all at one random offset.

    The low-discrepancy grid of VDM (arXiv 2107.00630, appendix I.1), over the global batch: `strata` are the
    parts [0, count) that the samples at hand were dealt.
    """
    return (strata.double() / count + offset) % 1.0


@dataclass(frozen=True)
class TimeSampler:
    """Noise times from uniform numbers; both sampling functions are those of SD3 (arXiv 2403.03206)."""

    kind: TimeSampling = "uniform"
    location: float = 0.0  # of logit_normal: mean of the times' logits (SD3, eq. 19: m)
    scale: float = 1.0  # of logit_normal: their deviation (s)
    mode_scale: float = 1.29  # of mode: s of SD3, eq. 20
    stratified: bool = True

    def times(self, u: Tensor) -> Tensor:
        if self.kind == "uniform":
            return u
        if self.kind == "mode":  # SD3's function of 1 - u, so that times rise with u
            return u - self.mode_scale * (torch.sin(math.pi / 2 * u) ** 2 - u)
        inside = u.clamp(1e-6, 1 - 1e-6)
        return torch.sigmoid(self.location + self.scale * math.sqrt(2) * torch.erfinv(2 * inside - 1))

    def importance(self, u: Tensor) -> Tensor:
        """dt/du: one over the density of the times, by which a mean over them becomes that over uniform times.

        Not of logit_normal, whose density is 0 at both ends: there the weight has no bound.
        """
        assert self.kind != "logit_normal"
        if self.kind == "uniform":
            return torch.ones_like(u)
        return 1 + self.mode_scale * (1 - math.pi / 2 * torch.sin(math.pi * u))


UNIFORM = TimeSampler()
MOST_MODE_SCALE = 1.75  # from 2 / (pi - 2) = 1.752 on the times of mode sampling do not rise with u


def check_sampler(sampler: TimeSampler) -> None:
    """ValueError, naming the setting, where one is not at its default that does nothing under `time_sampling`."""
    of_kind = {"location": "logit_normal", "scale": "logit_normal", "mode_scale": "mode"}
    for name, kind in of_kind.items():
        if sampler.kind != kind and getattr(sampler, name) != getattr(UNIFORM, name):
            raise ValueError(
                f"{name}: does nothing under time_sampling: {sampler.kind}, expected its default "
                f"{getattr(UNIFORM, name):g} or time_sampling: {kind}"
            )
