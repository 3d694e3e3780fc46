"""64 memorized pairs are sampled back in both directions, with every schedule, prediction type and loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from mmldlm.diffusion.gaussian import LatentConfig, LatentLoss, LatentSampler, PredictionType
from mmldlm.diffusion.noise import Mode, Noise, draw_noise, mode_weights
from mmldlm.diffusion.noise_schedule import NoiseScheduleName
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import Generation, Sampler, SamplingConfig
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig
from tests.helpers.small_model import initialize
from tests.helpers.toy_pairs import (
    COMBINATIONS,
    MASK,
    PAD,
    VOCAB,
    blanks,
    gaussian,
    objective,
    random_pairs,
    select,
    texts_of,
)

CHANNELS = 32
PAIRS = random_pairs((4,) * 32 + (6,) * 32, CHANNELS)
COPIES = 4  # of each pair in a step's batch: as many noise times
SAMPLERS: tuple[LatentSampler, ...] = get_args(LatentSampler)
PEAK_LR, WARMUP = 1e-2, 20
# Steps, and the share of l2t in them. Epsilon is the harder to learn: near t = 0 it is what little is left of z.
RECIPES: dict[PredictionType, tuple[int, float]] = {"epsilon": (320, 0.5), "x0": (200, 0.75), "v": (200, 0.75)}

# One of all, of a prediction that the runs of test_learning.py do not have.
COVERING = {("vp_linear", "v", "mse")}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BATCH = select(PAIRS, [row for row in range(len(PAIRS.lengths)) for _ in range(COPIES)])
BATCH.slots.copy_(torch.arange(len(BATCH.lengths)))


@cache
def noise_of(step: int, share: float) -> Noise:
    return draw_noise(BATCH, 0, step, len(BATCH.lengths), mode_weights({"l2t": share, "t2l": 1 - share}))


def learned_by_heart(total: Objective, steps: int, share: float) -> MMDiT:
    torch.manual_seed(0)
    config = ModelConfig(depth=1, width=48, latent_width=128, num_heads=2, conditioning_width=128, modulation_rank=0)
    shape = DataShape(VOCAB, MASK, PAD, max(PAIRS.lengths), 1, CHANNELS)
    model = MMDiT(config, shape, latent_skip=LatentConfig(prediction=total.latent.prediction_type).has_skip)
    initialize(model)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = PEAK_LR * min((step + 1) / WARMUP, 1 - step / steps)
        noised = total.corrupt(BATCH, noise_of(step, share))
        loss, _ = total(model, noised, noised.counts.tolist())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def memorize(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss
) -> tuple[float, dict[str, float]]:
    """Token accuracy of l2t and, by sampler, mean cosine of t2l after learning the 64 pairs."""
    latent = gaussian(schedule, prediction, loss, CHANNELS)
    total = objective(latent, latent_weight=1.0)
    model = learned_by_heart(total, *RECIPES[prediction])

    def sample(mode: Mode, config: SamplingConfig) -> Generation:
        generator = torch.Generator().manual_seed(1)
        latents = PAIRS.latents if mode == "l2t" else torch.zeros_like(PAIRS.latents)
        start = texts_of(PAIRS) if mode == "t2l" else blanks(PAIRS.lengths)
        return Sampler(model, total.text, latent, config).generate(mode, generator, latents, start)

    accuracy = (sample("l2t", SamplingConfig(8, temperature=0.0)).tokens == PAIRS.tokens).float().mean()
    cosines = {}
    for sampler in SAMPLERS:
        latents = sample("t2l", SamplingConfig(t2l_steps=32, latent_sampler=sampler)).latents
        cosines[sampler] = float(F.cosine_similarity(latents, PAIRS.latents, dim=-1).mean())
    return float(accuracy), cosines


@pytest.mark.parametrize(
    ("schedule", "prediction", "loss"),
    [pytest.param(*names, marks=[] if names in COVERING else pytest.mark.slow) for names in COMBINATIONS],
)
def test_memorized_pairs_are_sampled_back(
    schedule: NoiseScheduleName, prediction: PredictionType, loss: LatentLoss
) -> None:
    accuracy, cosines = memorize(schedule, prediction, loss)
    assert accuracy >= 0.95
    assert min(cosines.values()) >= 0.95
