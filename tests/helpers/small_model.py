"""Small networks with every part switched on, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.batch import PackedLayout
from mmldlm.checkpoint.state import load_model_state
from mmldlm.config import RunConfig
from mmldlm.data.manifest import Manifest
from mmldlm.loading.factory import build_meta_model
from mmldlm.model.activation_checkpoint import KEEP_ALL, MemoryConfig
from mmldlm.model.attention import Backend
from mmldlm.model.mmdit import DataShape, MMDiT, ModelConfig, Precision, Prediction
from mmldlm.utils.meta_device import materialize

VOCAB, MASK, PAD = 23, 21, 22
CHANNELS, MAX_LENGTH = 6, 16


def small_model(
    latent_tokens: int = 1,
    backend: Backend = "sdpa",
    stir: float = 0.15,
    memory: MemoryConfig = KEEP_ALL,
    precision: Precision = "fp32",
    device: str = "cpu",
    **config: object,
) -> MMDiT:
    """Two blocks; `stir` is added to every parameter, for at initialization the blocks pass their input on."""
    settings = {"depth": 2, "width": 32, "num_heads": 2, "conditioning_width": 24, "modulation_rank": 8} | config
    shape = DataShape(VOCAB, MASK, PAD, MAX_LENGTH, latent_tokens, CHANNELS)
    model = MMDiT(ModelConfig(**settings), shape, backend, memory, precision, latent_skip=True)  # type: ignore[arg-type]
    initialize(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += stir * torch.randn_like(parameter)
    return model if device == "cpu" else model.to(device)


def initialize(model: MMDiT, seed: int = 0) -> MMDiT:
    load_model_state(model, model.initial_weights(seed))
    return model


@dataclass(frozen=True)
class Inputs:
    tokens: Tensor
    latents: Tensor
    t_text: Tensor
    t_latent: Tensor
    lengths: tuple[int, ...]

    @property
    def layout(self) -> PackedLayout:
        return PackedLayout(self.lengths, self.latents.shape[1], self.tokens.device)

    def rows(self, order: list[int]) -> Inputs:
        """Some samples, in the order asked for."""
        texts = self.tokens.split(self.lengths)
        return Inputs(
            torch.cat([texts[row] for row in order]),
            self.latents[order],
            self.t_text[order],
            self.t_latent[order],
            tuple(self.lengths[row] for row in order),
        )

    def to(self, device: str) -> Inputs:
        tensors = (self.tokens, self.latents, self.t_text, self.t_latent)
        return Inputs(*(tensor.to(device) for tensor in tensors), self.lengths)

    def run(self, model: MMDiT) -> Prediction:
        """Logits at every position."""
        positions = torch.arange(len(self.tokens), device=self.tokens.device)
        return model(self.tokens, self.latents, self.t_text, self.t_latent, self.layout, positions)


def random_inputs(lengths: tuple[int, ...], latent_tokens: int = 1, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    return Inputs(
        tokens=torch.randint(0, MASK + 1, (sum(lengths),), generator=generator),
        latents=torch.randn(count, latent_tokens, CHANNELS, generator=generator),
        t_text=torch.rand(count, generator=generator),
        t_latent=torch.rand(count, generator=generator),
        lengths=lengths,
    )


def build_model(config: RunConfig, manifest: Manifest) -> MMDiT:
    """Return the network of a config on the host, with its initial weights."""
    model = build_meta_model(config, manifest, "cpu")
    materialize(model, "cpu")
    return initialize(model, config.run.weights_seed)
