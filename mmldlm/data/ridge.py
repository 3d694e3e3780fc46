"""Ridge regression from token counts, for latents that are nearly linear in the words of a text.

Shape letters: n texts, V vocabulary, D targets.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE_PENALTY = 1.0
CG_STEPS = 50


def with_bias(counts: Tensor) -> Tensor:
    """Return the counts with a column of ones, [n, V + 1]."""
    return torch.cat([counts, torch.ones(len(counts), 1, dtype=torch.float64).to_sparse()], 1).coalesce()


def ridge(features: Tensor, targets: Tensor) -> Tensor:
    """Return the W [V, D] that minimizes |features W - targets|^2 + penalty |W|^2, by conjugate gradients.

    All columns are solved at the same time, preconditioned by the diagonal (Saad, Iterative Methods for Sparse Linear
    Systems, 2nd edition, algorithm 9.1).
    """
    transposed = features.t().coalesce()
    diagonal = (torch.sparse.sum(features * features, 0).to_dense() + RIDGE_PENALTY)[:, None]
    weights = targets.new_zeros(features.shape[1], targets.shape[1])
    residual = transposed @ targets
    direction = preconditioned = residual / diagonal
    product = (residual * preconditioned).sum(0)
    for _ in range(CG_STEPS):
        image = transposed @ (features @ direction) + RIDGE_PENALTY * direction
        step = product / (direction * image).sum(0).clamp_min(1e-30)
        weights, residual = weights + step * direction, residual - step * image
        preconditioned = residual / diagonal
        previous, product = product, (residual * preconditioned).sum(0)
        direction = preconditioned + product / previous.clamp_min(1e-30) * direction
    return weights
