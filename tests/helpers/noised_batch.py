"""Corrupted micro-batches for the small networks, with the objective that measures them."""

from __future__ import annotations

import torch

from mmldlm.batch import Batch
from mmldlm.diffusion.gaussian import GaussianDiffusion, LatentConfig
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import Mode, draw_noise, mode_weights
from mmldlm.diffusion.objective import LossConfig, NoisedBatch, Objective
from tests.helpers.small_model import MASK, random_inputs

LENGTHS = (4, 4, 9, 2)


def noised_batch(
    mode: Mode, latent_tokens: int = 1, lengths: tuple[int, ...] = LENGTHS, loss: LossConfig | None = None
) -> tuple[Objective, NoisedBatch]:
    inputs, loss = random_inputs(lengths, latent_tokens), loss or LossConfig()
    index = torch.arange(len(lengths))
    batch = Batch(inputs.tokens.clamp_max(MASK - 1), inputs.latents, lengths, index, index)
    objective = Objective(loss, MaskedDiffusion(MASK, "elbo"), GaussianDiffusion(LatentConfig(), loss.latent))
    return objective, objective.corrupt(batch, draw_noise(batch, 0, 0, len(lengths), mode_weights(mode)))
