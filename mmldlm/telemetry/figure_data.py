"""The arrays that figures, histograms and tables of texts are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FigureData:
    """Of n held-out samples, and of what the run makes of them in the modes that it trains.

    Latents are standardized, D = M x C numbers each.
    """

    tokens: list[np.ndarray]  # n of int64 [L]
    truth: np.ndarray  # float32 [n, D]: their latents
    found: np.ndarray | None  # float32 [n, D]: t2l, the latents found for the texts
    made: np.ndarray | None  # float32 [m, D]: joint, latents out of noise
    written: list[list[int]]  # m of tokens: the texts that came with them
    similarity: np.ndarray | None  # [n, n]: cosine of each found latent to each true one, on the encoder's scale
    likely_lengths: np.ndarray | None  # int64 [n]: l2t, the likeliest length given the latent
    hits: np.ndarray | None  # [2, longest]: l2t, by position the tokens guessed right from the latent alone, and all

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens])
