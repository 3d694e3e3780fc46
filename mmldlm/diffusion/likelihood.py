"""The likelihood bound of texts: one draw of its estimate.

Shape letters: B samples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.batch import Batch
from mmldlm.diffusion.gaussian import GaussianDiffusion
from mmldlm.diffusion.masked import MaskedDiffusion, TextConfig
from mmldlm.diffusion.noise import Noise
from mmldlm.diffusion.objective import LossConfig, Network, Objective

BOUND_SAMPLER = TextConfig(masks="exact").sampler  # of the noise times


def bound_terms(
    network: Network, mask_id: int, latent: GaussianDiffusion, batch: Batch, noise: Noise, device: torch.device
) -> Tensor:
    """Return one draw of the terms of each sample's likelihood bound, whatever loss the network was trained with.

    A draw masks exactly n = ceil(t L) of a sample's L tokens, see `MaskedDiffusion.weights`.

    Args:
        batch: The samples, on the host.
        noise: A noise time of the text by `BOUND_SAMPLER`; the latent's is 0, or 1 for a text without a latent.

    Returns:
        float64 [5, B] on the host: the noise time of the text; the number of masked tokens; their nats, summed; the
        same with the weights of the bound, an unbiased estimate of the negative ELBO; the nats of the length.
    """
    noised = Objective(LossConfig(), MaskedDiffusion(mask_id, "elbo", "exact"), latent).corrupt(batch, noise)
    prediction, _, length_logits, *_ = network(*noised.to(device).inputs)
    # On the host, where the order of summation is fixed.
    nll, sample = prediction.double().cpu(), noised.layout.sample_of_token[noised.positions]
    empty = torch.zeros(len(batch.lengths), dtype=torch.float64)
    token_terms = torch.ones_like(nll), nll, noised.token_weight.double() * nll
    sample_terms = [empty.index_add(0, sample, values) for values in token_terms]
    length = F.cross_entropy(length_logits.double().cpu(), noised.length_target, reduction="none")
    return torch.stack([noise.t_text.double(), *sample_terms, length])
