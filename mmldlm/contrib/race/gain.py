"""Estimate an arm's gain over the base, with luck taken into account, and say how sure the n-th proposal must be.

All runs of a race have the same samples, noise and masks. So two runs of one config differ only by luck: by their
initial weights, and by the rounding that follows from them. We train the base from several initial weights to see how
large that luck is at each step. An arm's difference must exceed it.

We assume that, at a step of the race, one config's values from several initial weights are independent draws from a
normal distribution, with the same variance for base and arm. Then each look is a t-test of two samples. That also holds
for an arm that is the base in disguise, e.g. equivalent code that rounds differently. We assume nothing about several
arms or looks, which share the base's runs: their errors are added (union bound).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmldlm.utils.intervals import student_quantile

NIGHT = 100  # after this many proposals, half of the budget of errors is spent


def share(n: int) -> float:
    """Return the share of the error budget that the n-th proposal may spend (n counts from 1).

    With N = `NIGHT`, N / ((n + N) (n + N - 1)) is positive and sums to 1 over all n. So the probability of any wrong
    decision stays below the budget, however many proposals come and however they depend on one another. This is
    alpha-spending (Foster and Stine, "Alpha-investing", JRSS B 70, 2008, and the gammas of LORD and LOND, Javanmard and
    Montanari, arXiv 1502.06197) without refunds, which would only bound the share of wrong decisions among the kept
    arms. The sequence is nearly constant over a night. With 6 / (pi n)^2, the hundredth proposal would get a fortieth.
    """
    return NIGHT / ((n + NIGHT) * (n + NIGHT - 1))


@dataclass(frozen=True)
class Gain:
    """The gain of an arm's mean over a reference's, as a fraction of the reference's.

    Attributes:
        error: Standard error of `value`, from the spread within each config.
    """

    value: float
    error: float
    degrees: int

    @classmethod
    def of(cls, arm: np.ndarray, reference: np.ndarray, base: np.ndarray, higher: bool = False) -> Gain:
        """Compute the gain from the values of runs. `base` needs values from at least two initial weights.

        The variance is pooled over all configs (Student's two-sample t-test). `higher` says which values are better.
        """
        groups = (arm, base) if reference is base else (arm, reference, base)
        degrees = sum(len(group) - 1 for group in groups)
        variance = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / degrees
        scale = abs(float(reference.mean())) * (1 if higher else -1)
        error = math.sqrt(variance * (1 / len(arm) + 1 / len(reference))) / abs(scale)
        return cls(float(arm.mean() - reference.mean()) / scale, error, degrees)

    def bounds(self, risk: float) -> tuple[float, float]:
        """Return a lower and an upper bound of the gain, each of them wrong with probability `risk`."""
        half_width = student_quantile(self.degrees, 2 * risk) * self.error
        return self.value - half_width, self.value + half_width
