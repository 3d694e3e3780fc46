"""Small data with known truth, and a denoiser that knows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import Batch, PackedLayout
from mmldlm.diffusion.gaussian import (
    SIGMA_MIN,
    GaussianDiffusion,
    LatentConfig,
    LatentLoss,
    PredictionType,
    per_sample,
)
from mmldlm.diffusion.masked import MaskedDiffusion, Masks
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from mmldlm.diffusion.objective import LossConfig, Objective

SCHEDULE_NAMES: tuple[NoiseScheduleName, ...] = get_args(NoiseScheduleName)
PREDICTIONS: tuple[PredictionType, ...] = get_args(PredictionType)
LOSSES: tuple[LatentLoss, ...] = get_args(LatentLoss)
COMBINATIONS = list(product(SCHEDULE_NAMES, PREDICTIONS, LOSSES))

VOCAB, MASK, PAD = 32, 30, 31
WORDS = 30  # tokens that a text may contain


def random_pairs(lengths: tuple[int, ...], channels: int = 16, latent_tokens: int = 1, seed: int = 0) -> Batch:
    """Random tokens with random latents on the sphere of norm sqrt(C)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (sum(lengths),), generator=generator)
    latents = torch.randn(len(lengths), latent_tokens, channels, generator=generator)
    index = torch.arange(len(lengths))
    return Batch(tokens, F.normalize(latents, dim=-1) * math.sqrt(channels), lengths, index, index)


def blanks(lengths: Sequence[int]) -> list[list[int]]:
    """Texts of these lengths to generate."""
    return [[MASK] * length for length in lengths]


def texts_of(batch: Batch) -> list[list[int]]:
    return [part.tolist() for part in batch.tokens.split(batch.lengths)]


def select(batch: Batch, rows: list[int]) -> Batch:
    """Samples of a batch in the order asked for; each keeps its slot."""
    texts = batch.tokens.split(batch.lengths)
    return Batch(
        tokens=torch.cat([texts[row] for row in rows]),
        latents=batch.latents[rows],
        lengths=tuple(batch.lengths[row] for row in rows),
        sample_ids=batch.sample_ids[rows],
        slots=batch.slots[rows],
    )


def gaussian(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss, channels: int = 16
) -> GaussianDiffusion:
    """The diffusion of latents from `random_pairs`, none of which is longer than sqrt(C)."""
    return GaussianDiffusion(LatentConfig(schedule, prediction), loss, max_norm=math.sqrt(channels) * (1 + 1e-6))


def objective(latent: GaussianDiffusion | None = None, masks: Masks = "independent", **losses: object) -> Objective:
    latent = latent or gaussian("vp_cosine", "v", "mse")
    config = LossConfig(latent=latent.loss_kind, **losses)  # type: ignore[arg-type]
    return Objective(config, MaskedDiffusion(MASK, config.text, masks), latent)


class PerfectDenoiser:
    """`MMDiT.forward`, knowing the pairs: certain of every token and length, right about every latent.

    `any_magnitude` scales each latent prediction by a random positive number: a network trained by cosine
    learns directions only. Finished texts leave a batch, so the denoiser finds its samples by their latents.
    """

    def __init__(self, pairs: Batch, latent: GaussianDiffusion, any_magnitude: bool = False):
        self.pairs, self.latent = pairs, latent
        self.generator = torch.Generator().manual_seed(0) if any_magnitude else None
        self._rows = list(range(len(pairs.lengths)))

    def __call__(
        self,
        noised_tokens: Tensor,
        noised_latents: Tensor,
        t_text: Tensor,
        t_latent: Tensor,
        layout: PackedLayout,
        positions: Tensor,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        pairs = self.find(layout, noised_latents)
        x0, t = pairs.latents, per_sample(t_latent, noised_latents)
        alpha, sigma = self.latent.noise_schedule.alpha(t), self.latent.noise_schedule.sigma(t)
        epsilon = (noised_latents - alpha * x0) / sigma.clamp_min(SIGMA_MIN)
        latent = self.latent.target(x0, epsilon, t_latent)
        if self.generator is not None:
            latent = latent * (3 * torch.randn(*latent.shape[:-1], 1, generator=self.generator)).exp()
        logits = 100.0 * F.one_hot(pairs.tokens[positions], VOCAB).float()
        text = logits if targets is None else F.cross_entropy(logits, targets, reduction="none")
        lengths = torch.tensor(layout.lengths)
        return text, latent, 100.0 * F.one_hot(lengths - 1, int(lengths.max())).float()

    def find(self, layout: PackedLayout, latents: Tensor) -> Batch:
        """Return the pairs of a batch. The null condition of guidance has noise as latents, and follows its batch."""
        if layout.lengths == self.pairs.lengths:
            return self.pairs
        cosines = F.normalize(latents.flatten(1), dim=-1) @ F.normalize(self.pairs.latents.flatten(1), dim=-1).T
        best = cosines.abs().max(1)
        if bool((best.values > 0.99).all()):
            self._rows = best.indices.tolist()
        pairs = select(self.pairs, self._rows)
        assert layout.lengths == pairs.lengths
        return pairs
