"""What the streams are read out to: token likelihoods, the number of tokens, and the learned weights of losses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.model.cpu_linear import Linear

CHUNK_ROWS = 256  # rows of logits alive at a time: a sixth of the memory of all at once, at 1.1x the time
MASKED_LOGIT = -1e9  # logit of a token that no text contains; finite, so that 0 * logit stays 0


def chunked_token_nll(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    """-log p(target) [P] in float32 of a linear head, without ever holding [P, V] logits."""
    if hidden_PD.shape[0] <= CHUNK_ROWS:
        return F.cross_entropy(_logits(hidden_PD, weight_VD, bias_V), targets_P, reduction="none")
    full_precision = hidden_PD.dtype == torch.float32 and not torch.is_autocast_enabled(hidden_PD.device.type)
    if full_precision and hasattr(F, "linear_cross_entropy"):  # PyTorch >= 2.13
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK_ROWS)
        return F.linear_cross_entropy(
            hidden_PD, weight_VD, targets_P, linear_bias=bias_V, reduction="none", options=options
        )
    return torch.cat(
        [
            checkpoint(_chunk_nll, hidden, weight_VD, bias_V, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in zip(hidden_PD.split(CHUNK_ROWS), targets_P.split(CHUNK_ROWS), strict=True)
        ]
    )


def chunked_token_terms(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    """[P, 3] in float32 of a linear head, without ever holding [P, V] logits: -log p(target), log of the softmax's
    denominator, and the mean of -log p over all tokens that have a probability."""
    if hidden_PD.shape[0] <= CHUNK_ROWS:
        return _chunk_terms(hidden_PD, weight_VD, bias_V, targets_P)
    return torch.cat(
        [
            checkpoint(_chunk_terms, hidden, weight_VD, bias_V, targets, use_reentrant=False, preserve_rng_state=False)
            for hidden, targets in zip(hidden_PD.split(CHUNK_ROWS), targets_P.split(CHUNK_ROWS), strict=True)
        ]
    )


def _chunk_terms(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    logits = _logits(hidden_PD, weight_VD, bias_V)
    log_z = logits.logsumexp(-1)
    possible = bias_V == 0
    mean = (logits * possible).sum(-1) / possible.sum()
    return torch.stack([log_z - logits.gather(1, targets_P[:, None]).squeeze(1), log_z, log_z - mean], 1)


def _logits(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    return F.linear(hidden_PD, weight_VD).float() + bias_V


def _chunk_nll(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_P: Tensor) -> Tensor:
    return F.cross_entropy(_logits(hidden_PD, weight_VD, bias_V), targets_P, reduction="none")


class TextHead(nn.Module):
    """Token logits, in which [MASK] and [PAD] have probability zero (MDLM, arXiv 2406.07524, section 3.2.3)."""

    def __init__(self, width: int, vocab_size: int, never: tuple[int, ...], tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, width))
        bias = torch.zeros(vocab_size)
        bias[list(never)] = MASKED_LOGIT
        self.register_buffer("bias", bias, persistent=False)
        self.bias: Tensor

    def forward(self, hidden_PD: Tensor, embedding_VD: Tensor, targets_P: Tensor | None, terms: bool = False) -> Tensor:
        """Logits [P, V] or, with targets, their negative log likelihoods [P]; both float32.

        `terms`: with targets [P, 3], see `chunked_token_terms`.
        """
        weight = embedding_VD if self.weight is None else self.weight
        if targets_P is None:
            return _logits(hidden_PD, weight, self.bias)
        loss_of = chunked_token_terms if terms else chunked_token_nll
        return loss_of(hidden_PD, weight, self.bias, targets_P)


class LengthHead(nn.Module):
    """log p(L | noised latents, t_latent), a categorical over 1..max_length (Mask-Predict, arXiv 1904.09324).

    It reads the latent stream before the first block: behind a joint attention the stream has seen the
    text's positions, and would learn to count what generation does not have yet.
    """

    def __init__(self, width: int, conditioning: int, max_length: int):
        super().__init__()
        self.time = Linear(conditioning, width)
        self.hidden = Linear(width, width)
        self.out = Linear(width, max_length)

    def forward(self, latents_BME: Tensor, time_BT: Tensor) -> Tensor:
        """Logits [B, max_length] in float32; column i stands for length i + 1."""
        return self.out(F.silu(self.hidden(latents_BME.mean(1)) + self.time(time_BT))).float()


class LossWeights(nn.Module):
    """Log variances s of losses that are weighted by exp(-s) (Kendall et al., arXiv 1705.07115, eq. 10).

    Adam moves a parameter by about the learning rate in a step, whatever its loss: ten times that is a pace at which
    weights keep up with their losses. And the derivative of exp(-s) loss + s / 2 is as large as the loss, far above
    those of the network's parameters: it would fill the norm that all gradients are clipped to. Adam does not see a
    factor of a gradient, so it is made small.
    """

    pace, gradient_share = 10.0, 0.01

    def __init__(self, first_weights: tuple[float, ...]):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([-math.log(weight) / self.pace for weight in first_weights]))

    def forward(self) -> Tensor:
        """s [losses] in float32."""
        s = self.pace * self.value.float()
        return s.detach() + self.gradient_share * (s - s.detach())
