"""`--interpolate A B`: texts between the latents of two sentences.

Shape letters: P points, M latent tokens of a sample, C latent channels.
"""

from __future__ import annotations

import numpy as np
import torch

from mmldlm.diffusion.sampling import Generation, SamplingConfig
from mmldlm.inference.generate import Watch, check_guidance, lengths_for, produce
from mmldlm.run.load import LoadedRun

PARALLEL = 1e-4  # sine of an angle between directions below which no arc is told from the chord


def between(a: np.ndarray, b: np.ndarray, points: int) -> np.ndarray:
    """float32 [P, M, C] from `a` to `b` [M, C], both included, in equal parts of the angle.

    Of each latent token the direction goes along the great circle (Shoemake, SIGGRAPH 1985; for generative models:
    White, arXiv 1609.04468), the norm from the one to the other. Standardized latents lie near the sphere of norm
    sqrt(C) around the mean latent: a straight line would cut through the inside, towards the latent of all texts and of
    none. Where the directions are the same, opposite or none, and no one great circle leads on, the line is straight.
    """
    share = np.linspace(0, 1, points)[:, None, None]
    norms = [np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True) for x in (a, b)]
    u, v = (x / np.maximum(norm, 1e-12) for x, norm in zip((a, b), norms, strict=True))
    angle = np.arccos(np.clip((u * v).sum(-1, keepdims=True), -1, 1))
    sine = np.sin(angle)
    arc = (sine > PARALLEL) & (norms[0] > 0) & (norms[1] > 0)
    turned = (np.sin((1 - share) * angle) * u + np.sin(share * angle) * v) / np.where(arc, sine, 1)
    norm = (1 - share) * norms[0] + share * norms[1]
    return np.where(arc, norm * turned, (1 - share) * a + share * b).astype(np.float32)


def interpolate(
    run: LoadedRun,
    config: SamplingConfig,
    seed: int,
    raw_latents: np.ndarray,
    points: int,
    length: int | None = None,
    watch: Watch | None = None,
) -> tuple[Generation, list[str]]:
    """A text for each of `points` between two latents [2, M, C] on the encoder's scale.

    All are of one length and written with the same random numbers, so that neighbors differ by their latents alone.
    The length is drawn from the length head in the middle, unless `length` fixes it.
    """
    check_guidance(run, "l2t", config)
    a, b = run.store.standardize(raw_latents)
    if not length:
        middle = torch.from_numpy(between(a, b, 3)[1:2])
        (length,) = lengths_for(run, middle, torch.Generator().manual_seed(seed))
    made = []
    for latent in torch.from_numpy(between(a, b, points)).split(1):
        # One by one: in a batch each sample has random numbers of its own.
        generator = torch.Generator().manual_seed(seed)
        made.append(produce(run, "l2t", config, generator, latent, (length,), watch=watch))
    together = Generation(
        torch.cat([part.tokens for part, _ in made]), (length,) * points, torch.cat([part.latents for part, _ in made])
    )
    return together, [text for _, texts in made for text in texts]
