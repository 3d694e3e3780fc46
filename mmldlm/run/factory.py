"""The network, the objective and the corruption of a step, as functions of a run's config and data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmldlm.batch import Batch
from mmldlm.config import RunConfig
from mmldlm.data.manifest import Manifest
from mmldlm.diffusion.gaussian import GaussianDiffusion
from mmldlm.diffusion.masked import MaskedDiffusion
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.model.attention import resolve_backend
from mmldlm.model.cpu_half import CPUHalfMMDiT
from mmldlm.model.mmdit import MMDiT
from mmldlm.model.parts import freeze_parts
from mmldlm.run.compatibility import data_shape


def build_model(config: RunConfig, manifest: Manifest, device_type: str) -> MMDiT:
    """Return the network with its initial weights, a function of `run.seed` alone; parts in `freeze` are frozen."""
    precision = "fp32" if config.precision == "auto" else config.precision  # auto: no launcher has resolved it
    half_precision = precision != "fp32"
    backend = resolve_backend(config.attention.backend, device_type, half_precision)
    network = CPUHalfMMDiT if half_precision and (device_type, backend) == ("cpu", "sdpa") else MMDiT
    uncertainty = config.loss.latent_weighting == "uncertainty"
    # The caller's random state stays as it was. Weights are drawn on the host, so no state of a device is saved.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        model = network(
            config.model,
            data_shape(manifest),
            backend,
            config.memory,
            precision,
            text_terms=config.loss.needs_text_terms,
            initial_loss_weights=(1.0, config.loss.latent_weight) if uncertainty else None,
            latent_skip=config.latent.has_skip,
        )
    freeze_parts(model, config.freeze)
    return model


def build_objective(config: RunConfig, manifest: Manifest) -> Objective:
    """Return the training objective of a run."""
    return Objective(
        config.loss,
        MaskedDiffusion(manifest.mask_id, config.loss.text, config.text.masks),
        GaussianDiffusion(config.latent, config.loss.latent, manifest.latent.max_norm, config.loss.huber_delta),
        config.log.noise_levels,
    )


def corrupt_step(
    config: RunConfig, objective: Objective, step: int, global_batch_size: int, micro_batches: Sequence[Batch]
) -> list[NoisedBatch]:
    """Noise the micro-batches of an optimizer step, on the host; the noise is a function of (seed, step, slot)."""
    weights = mode_weights_at(step, config.mode, config.mode_schedule)
    samplers = config.text.sampler, config.latent.sampler
    return [
        objective.corrupt(batch, draw_noise(batch, config.run.seed, step, global_batch_size, weights, *samplers))
        for batch in micro_batches
    ]
