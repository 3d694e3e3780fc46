"""Points between two latents.

Shape letters: P points, M latent tokens, C latent channels.
"""

from __future__ import annotations

import numpy as np

MIN_SINE = 1e-4  # below this angle between two directions, arc and chord cannot be distinguished


def slerp(a: np.ndarray, b: np.ndarray, points: int) -> np.ndarray:
    """Interpolate from `a` to `b` [M, C], both included, in equal steps of the angle. Return float32 [P, M, C].

    The direction of each latent token follows the great circle (Shoemake, SIGGRAPH 1985, and for generative models
    White, arXiv 1609.04468). Its norm is interpolated linearly. Standardized latents lie near the sphere of norm
    sqrt(C) around the mean latent. A straight line would pass near the mean of all texts, which is no text's latent. If
    no unique great circle exists (equal or opposite directions, or a zero latent), the interpolation is linear.
    """
    # Shapes: weight [P, 1, 1], directions u and v [M, C], norms and angle [M, 1].
    weight = np.linspace(0, 1, points)[:, None, None]
    norms = [np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True) for x in (a, b)]
    u, v = (x / np.maximum(norm, 1e-12) for x, norm in zip((a, b), norms, strict=True))
    angle = np.arccos(np.clip((u * v).sum(-1, keepdims=True), -1, 1))
    sine = np.sin(angle)
    has_arc = (sine > MIN_SINE) & (norms[0] > 0) & (norms[1] > 0)
    # Rows without an arc are divided by 1 here, and follow the straight line below.
    direction = (np.sin((1 - weight) * angle) * u + np.sin(weight * angle) * v) / np.where(has_arc, sine, 1)
    norm = (1 - weight) * norms[0] + weight * norms[1]
    return np.where(has_arc, norm * direction, (1 - weight) * a + weight * b).astype(np.float32)
