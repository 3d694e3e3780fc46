"""Gains of arms over the base, luck included, and how sure one must be of them for the n-th proposal.

All runs of a race have the same samples, noise and masks, so what differs between two runs of one config is luck alone:
the initial weights, and what rounding makes of them. The base is trained from several initial weights, which show how
large that luck is at each step; the difference of an arm must exceed it.

Assumption: at a step of the race, the values of the runs of one config from several initial weights are independent
draws of one normal distribution, whose variance is the same for base and arm. Under it each look is a t-test of two
samples, also for an arm that is the base by another name: other code of the same network, other rounding, other initial
weights. Nothing is assumed of several arms or looks, which share the base's runs: their errors are added (union bound).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmldlm.utils.intervals import student_quantile

NIGHT = 100  # proposals after which the budget of errors is half spent


def share(n: int) -> float:
    """Return the part of the budget of errors that the n-th proposal may spend, n from 1.

    With N = `NIGHT`, N / ((n + N) (n + N - 1)) is positive and sums to 1 over all n, so that the probability of any
    wrong decision is below the budget however many proposals come, and however they depend on one another: the sequence
    of alpha-spending (Foster and Stine, "Alpha-investing", JRSS B 70, 2008, and the gammas of LORD and LOND, Javanmard
    and Montanari, arXiv 1502.06197), without their refunds, which would bound the share of wrong ones among those kept.
    It is nearly constant over a night, where 6 / (pi n)^2 leaves the hundredth proposal a fortieth of it.
    """
    return NIGHT / ((n + NIGHT) * (n + NIGHT - 1))


@dataclass(frozen=True)
class Gain:
    """The gain of an arm's mean over a reference's, as a fraction of the reference's.

    Attributes:
        error: Standard error of `value`, by the spread within each of the configs.
    """

    value: float
    error: float
    degrees: int

    @classmethod
    def of(cls, arm: np.ndarray, reference: np.ndarray, base: np.ndarray, higher: bool = False) -> Gain:
        """Return the gain by the values of runs, from at least two initial weights in `base`.

        The variance is pooled over all configs (Student's t-test of two samples); `higher` values are better, or lower.
        """
        groups = (arm, base) if reference is base else (arm, reference, base)
        degrees = sum(len(group) - 1 for group in groups)
        variance = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / degrees
        scale = abs(float(reference.mean())) * (1 if higher else -1)
        error = math.sqrt(variance * (1 / len(arm) + 1 / len(reference))) / abs(scale)
        return cls(float(arm.mean() - reference.mean()) / scale, error, degrees)

    def bounds(self, risk: float) -> tuple[float, float]:
        """Return bounds of the gain, each of which is wrong with probability `risk`."""
        half_width = student_quantile(self.degrees, 2 * risk) * self.error
        return self.value - half_width, self.value + half_width
