"""The practice that users come from: the package `mmdit` 0.3.0 as backbone, in a wrapper after
its documentation.

Token and learned position embeddings, a two-layer latent encoder, one time embedding for both modalities, all samples
padded to the most positions, logits of the whole vocabulary at every position, and in each step NaN checks and an
accuracy whose values are read at once. Text width, depth, head width, data and noise are those of the trainer.

Shapes: B samples, L positions, M latent tokens, D width, C latent channels, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.task import HEAD_WIDTH, heads_of
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.model.mmdit import DataShape


class ReferenceModel(nn.Module):
    def __init__(self, depth: int, width: int, shape: DataShape, streams: int, flash: bool = False):
        """`streams`: residual streams of the hyper-connections; `flash`: attention by PyTorch's fused kernel."""
        super().__init__()
        from mmdit.mmdit_generalized_pytorch import MMDiT

        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, width)
        self.positions = nn.Embedding(shape.max_length, width)
        self.latents = nn.Sequential(nn.Linear(shape.latent_channels, width), nn.GELU(), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.width = width
        self.backbone = MMDiT(
            depth=depth,
            dim_modalities=(width, width),
            dim_cond=width,
            dim_head=HEAD_WIDTH,
            heads=heads_of(width),
            qk_rmsnorm=True,
            flash_attn=flash,
            num_residual_streams=streams,
        )
        self.text_head = nn.Linear(width, shape.vocab_size)
        self.latent_head = nn.Linear(width, shape.latent_channels)

    def forward(
        self, tokens_BL: Tensor, latents_BMC: Tensor, t_text_B: Tensor, t_latent_B: Tensor, real_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] and the predicted latents [B, M, C]."""
        text = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        conditioning = self._time(t_text_B) + self._time(t_latent_B)
        text, latents = self.backbone(
            modality_tokens=(text, self.latents(latents_BMC)), modality_masks=(real_BL, None), time_cond=conditioning
        )
        return self.text_head(text), self.latent_head(latents)

    def _time(self, t_B: Tensor) -> Tensor:
        half = self.width // 2
        rate = torch.exp(-math.log(10_000.0) * torch.arange(half, device=t_B.device) / half)
        angle = 1000.0 * t_B[:, None] * rate
        return self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))


def padded(noised: NoisedBatch, pad_id: int, length: int) -> dict[str, Tensor]:
    """A corrupted micro-batch as rectangles [B, length] on its device, as the practice lays it out."""
    device, lengths = noised.noised_tokens.device, noised.layout.lengths
    rows = noised.noised_tokens.split(lengths)
    tokens = F.pad(
        pad_sequence(list(rows), batch_first=True, padding_value=pad_id), (0, length - max(lengths)), value=pad_id
    )
    real = torch.arange(length, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    place = noised.layout.sample_of_token * length + noised.layout.position
    targets = torch.full((tokens.numel(),), -100, device=device)
    targets[place[noised.positions]] = noised.targets
    weights = torch.zeros(tokens.numel(), device=device)
    weights[place[noised.positions]] = noised.token_weight
    return {"tokens": tokens, "real": real, "targets": targets, "weights": weights}


def reference_loss(
    model: nn.Module, noised: NoisedBatch, latent_weight: float, length: int
) -> tuple[Tensor, dict[str, float]]:
    """Loss of one micro-batch by the practice: every logit, and values read from the device in every step."""
    rectangle = padded(noised, model.shape.pad_id, length)
    logits, latents = model(
        rectangle["tokens"], noised.noised_latents, noised.t_text, noised.t_latent, rectangle["real"]
    )
    flat, targets = logits.flatten(0, 1), rectangle["targets"]
    nll = F.cross_entropy(flat.float(), targets, ignore_index=-100, reduction="none")
    text = (nll * rectangle["weights"]).sum() / rectangle["real"].sum()
    cosine = F.cosine_similarity(latents.float().flatten(1), noised.latent_target.flatten(1), dim=-1)
    latent = ((1 - cosine) * noised.latent_weight).sum() / noised.latent_weight.sum().clamp_min(1)
    loss = text + latent_weight * latent
    masked = targets != -100
    accuracy = (flat.argmax(-1) == targets)[masked].float().mean()
    for value in (text, latent, loss):
        if torch.isnan(value).any().item():
            raise FloatingPointError("a loss is not a number")
    return loss, {"loss": loss.item(), "text": text.item(), "latent": latent.item(), "accuracy": accuracy.item()}
