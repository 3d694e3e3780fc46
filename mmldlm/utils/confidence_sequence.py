"""Confidence sequence: 95 % intervals of a running mean that hold at all times together, however often one looks."""

from __future__ import annotations

import numpy as np

from mmldlm.utils.ratio import CONFIDENCE


def confidence_sequence(values: np.ndarray, effect_variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of the first n values and the half-width of its interval, for each n; infinite for small n.

    The interval has all means that Lai's t-test martingale with a normal mixture over effects does not reject (Wang
    and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", arXiv
    2310.03722). With Student's t of n values, r = 1 + n g and q = (r / alpha^2)^(1/n) it is

        t^2 < (n - 1) (q - 1) / (1 - q / r), if q < r.

    For independent normal values of one mean it covers that mean at all n together with a probability of at least
    95 %. For large n it is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas
    ("Time-uniform central limit theory and asymptotic confidence sequences", arXiv 2103.06476). That needs neither
    independence nor one mean: it covers the running average of E[value | all values before].

    Args:
        values: The values in their order, at least one.
        effect_variance: Variance g of the mixture over mean / standard deviation; tightest near n = 8 / g.
    """
    n = np.arange(1, len(values) + 1)
    shifted = values - values[0]  # so that the sum of squares loses no digits
    means = np.cumsum(shifted) / n
    squared_errors = np.maximum(np.cumsum(shifted**2) / n - means**2, 0) / np.maximum(n - 1, 1)
    r = 1 + n * effect_variance
    q = (r / (1 - CONFIDENCE) ** 2) ** (1 / n)
    half_widths = np.full(len(n), np.inf)
    bounded = (q < r) & (n > 1)
    squared_t = (n - 1) * (q - 1) / np.where(bounded, 1 - q / r, 1)
    half_widths[bounded] = np.sqrt(squared_t * squared_errors)[bounded]
    return means + values[0], half_widths
