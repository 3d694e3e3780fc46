"""`FigureData`: the arrays behind figures, histograms and text tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FigureData:
    """n held-out samples, and generations for them in the modes that the run trains; None for other modes.

    Latents are standardized and flat, D = M x C numbers each.
    """

    tokens: list[np.ndarray]  # n arrays int64 [length]
    true_latents: np.ndarray  # float32 [n, D]
    t2l_latents: np.ndarray | None  # float32 [n, D]: generated for the texts
    joint_latents: np.ndarray | None  # float32 [m, D]: generated from noise
    joint_tokens: list[list[int]]  # m texts: generated together with `joint_latents`
    similarity: np.ndarray | None  # [n, n]: cosine of each t2l latent (row) to each true one, on the encoder's scale
    likeliest_lengths: np.ndarray | None  # int64 [n]: l2t, argmax of the length head given the latent
    token_hits: np.ndarray | None  # [2, longest]: l2t from the latent alone, correct tokens by position, and all tokens

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64 [n]."""
        return np.array([len(tokens) for tokens in self.tokens])
