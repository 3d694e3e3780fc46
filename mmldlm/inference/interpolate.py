"""`--interpolate A B`: texts between the latents of two sentences.

Shape letters: P points, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import numpy as np
import torch

from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.inference.generate import StepCallback, check_guidance, draw_text_lengths, generate_and_decode
from mmldlm.run.load import LoadedRun

MIN_SINE = 1e-4  # of the angle between two directions: below it, arc and chord cannot be distinguished


def slerp(a: np.ndarray, b: np.ndarray, points: int) -> np.ndarray:
    """Interpolate from `a` to `b` [M, C], both included, in equal steps of the angle; float32 [P, M, C].

    The direction of each latent token follows the great circle (Shoemake, SIGGRAPH 1985; for generative models: White,
    arXiv 1609.04468), its norm is interpolated linearly. Standardized latents are near the sphere of norm sqrt(C)
    around the mean latent: a straight line would pass through the inside, near the mean of all texts, which is the
    latent of none. The interpolation is linear where no unique great circle exists: if the directions are equal or
    opposite, or a latent is zero.
    """
    # Shapes: weight [P, 1, 1], directions u and v [M, C], norms and angle [M, 1].
    weight = np.linspace(0, 1, points)[:, None, None]
    norms = [np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True) for x in (a, b)]
    u, v = (x / np.maximum(norm, 1e-12) for x, norm in zip((a, b), norms, strict=True))
    angle = np.arccos(np.clip((u * v).sum(-1, keepdims=True), -1, 1))
    sine = np.sin(angle)
    has_arc = (sine > MIN_SINE) & (norms[0] > 0) & (norms[1] > 0)
    # Rows without an arc are divided by 1 here and take the straight line below.
    direction = (np.sin((1 - weight) * angle) * u + np.sin(weight * angle) * v) / np.where(has_arc, sine, 1)
    norm = (1 - weight) * norms[0] + weight * norms[1]
    return np.where(has_arc, norm * direction, (1 - weight) * a + weight * b).astype(np.float32)


def interpolate(
    run: LoadedRun,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray,
    points: int,
    length: int | None = None,
    callback: StepCallback | None = None,
) -> tuple[Generation, list[str]]:
    """Generate a text for each of `points` latents between two latents.

    All texts have the same length and use the same random numbers, so neighbors differ by their latents alone.

    Args:
        raw_latents: The two ends, [2, M, C] on the encoder's scale.
        points: Number of latents, both ends included.
        length: Tokens of each text; by default the median of the length head for the latent in the middle.

    Returns:
        The generation of all points, its latents on the encoder's scale, and its texts.
    """
    check_guidance(run, "l2t", config)
    a, b = run.store.standardize(raw_latents)
    if not length:
        middle = torch.from_numpy(slerp(a, b, 3)[1:2])
        (length,) = draw_text_lengths(run, middle, torch.Generator().manual_seed(seed))
    results = []
    for latent in torch.from_numpy(slerp(a, b, points)).split(1):
        # One by one: within a batch the samples get different random numbers.
        generator = torch.Generator().manual_seed(seed)
        results.append(generate_and_decode(run, "l2t", config, generator, latent, (length,), callback=callback))
    generation = Generation(
        torch.cat([part.tokens for part, _ in results]),
        (length,) * points,
        torch.cat([part.latents for part, _ in results]),
    )
    return generation, [text for _, texts in results for text in texts]
