"""One draw of the estimate of the likelihood bound of texts.

Shape letters: B samples.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.diffusion.masked import TextConfig
from mmldlm.diffusion.noise import draw_noise, mode_weights
from mmldlm.diffusion.objective import Network, Objective

BOUND_SAMPLER = TextConfig(masks="exact").sampler  # draws the noise times


@torch.no_grad()
def bound_terms(
    network: Network,
    objective: Objective,
    batch: Batch,
    t_latent: float,
    seed: int,
    draw: int,
    num_slots: int,
    device: torch.device,
) -> Tensor:
    """Return one draw of the terms of each sample's likelihood bound, for networks trained with any loss.

    A draw masks exactly n = ceil(t L) of a sample's L tokens, see `MaskedDiffusion.weights`.

    Args:
        batch: The samples, on the host.
        t_latent: Noise time of the latents: 0, or 1 to give the network noise in place of the latent.
        draw: Number of the draw, which is a key of its random numbers.
        num_slots: Number of texts that share the low-discrepancy grid of a draw's noise times.

    Returns:
        float64 [5, B] on the host. The rows are the noise time of the text, the number of masked tokens, the sum of
        their nats, the sum weighted as in the bound (an unbiased estimate of the negative ELBO), and the length's nats.
    """
    noise = draw_noise(batch, seed, draw, num_slots, mode_weights("l2t"), BOUND_SAMPLER)
    noise = replace(noise, t_latent=torch.full_like(noise.t_latent, t_latent))
    noised = objective.for_validation().corrupt(batch, noise)
    prediction, _, length_logits, *_ = network(*noised.to(device).inputs)
    # Summed on the host, where the order of summation is fixed.
    nll, sample = prediction.double().cpu(), noised.layout.sample_of_token[noised.positions]
    empty = torch.zeros(len(batch.lengths), dtype=torch.float64)
    token_terms = torch.ones_like(nll), nll, noised.token_weight.double() * nll
    sample_terms = [empty.index_add(0, sample, values) for values in token_terms]
    length = F.cross_entropy(length_logits.double().cpu(), noised.length_target, reduction="none")
    return torch.stack([noise.t_text.double(), *sample_terms, length])
