"""Corrupted micro-batches for the small networks, with the objective that measures them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmldlm.batch import Batch
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from tests.helpers.small_model import MASK, PAD, random_inputs

LENGTHS = (4, 4, 9, 2)


def noised_batch(
    mode: Any,
    latent_tokens: int = 1,
    lengths: tuple[int, ...] = LENGTHS,
    loss: LossConfig | None = None,
    weights: Sequence[float] | None = None,
    **aux: Any,
) -> tuple[Objective, NoisedBatch]:
    inputs, loss = random_inputs(lengths, latent_tokens), loss or LossConfig()
    index, tokens = torch.arange(len(lengths)), inputs.tokens.clamp_max(MASK - 1)
    if aux and lengths[-1] > 2:
        tokens[-2] = PAD  # the last sample has a prefix
    of_samples = None if weights is None else torch.tensor(weights)
    batch = Batch(tokens, inputs.latents, lengths, index, index, weights=of_samples)
    text = MaskedDiffusion(MASK, loss.text, prefix_end=PAD)
    objective = Objective(loss, text, GaussianDiffusion(LatentConfig(), loss.latent), **aux)
    return objective, objective.corrupt(batch, draw_noise(batch, 0, 0, len(lengths), mode_weights(mode)))
