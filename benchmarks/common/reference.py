"""The practice that users come from: the package `mmdit` 0.3.0 in a wrapper and a loop after its documentation.

Token and learned position embeddings, a two-layer latent encoder, one time embedding for both modalities, all samples
padded to the maximum positions, logits of the whole vocabulary at every position, and in each step NaN checks and an
accuracy whose values are read at once. Text width, depth, head width, data and noise are those of the trainer.

Shapes: B samples, L positions, M latent tokens, D width, C latent channels, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.common.task import HEAD_WIDTH, Feed, Task, device, heads_of
from mmldlm.batch import Batch
from mmldlm.data.store import Store
from mmldlm.diffusion.noise import draw_noise, mode_weights_at
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.model.mmdit import DataShape
from mmldlm.run.compatibility import data_shape
from mmldlm.run.factory import build_objective


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
    """Pad a corrupted micro-batch to rectangles [B, length] on its device."""
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
    """Return the loss of one micro-batch with all logits, and its values, read from the device."""
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


class ReferenceRun:
    """The loop, with the methods of the trainer's: PyTorch's default AdamW and clipping; nothing is logged."""

    def __init__(self, task: Task, streams: int, flash: bool, feed: Feed):
        self.config = task.config()
        self.feed, self.device = feed, device()
        manifest = Store.open(task.store).manifest
        self.objective, shape = build_objective(self.config, manifest), data_shape(manifest)
        torch.manual_seed(self.config.run.seed)
        self.model = ReferenceModel(task.depth, task.width, shape, streams, flash).to(self.device).train()
        optim = self.config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay
        )
        self.read: dict[str, float] = {}

    def step(self) -> None:
        (noised,) = self.corrupt(self.feed.step, [self.feed.batch()])
        self.backward(self.loss(noised))
        self.update()
        self.end_step()

    def corrupt(self, step: int, micro_batches: list[Batch]) -> list[NoisedBatch]:
        config = self.config
        weights = mode_weights_at(step, config.mode, config.mode_schedule)
        size, samplers = config.train.global_batch_size, (config.text.sampler, config.latent.sampler)
        return [
            self.objective.corrupt(batch, draw_noise(batch, config.run.seed, step, size, weights, *samplers)).to(
                self.device
            )
            for batch in micro_batches
        ]

    def loss(self, noised: NoisedBatch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss, self.read = reference_loss(
                self.model, noised, self.config.loss.latent_weight, self.model.shape.max_length
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def end_step(self) -> None:
        """The values were read in the forward pass."""
