"""FLOPs of a training step that serve its result, in closed form, and the share of a GPU's peak that they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mmldlm.model.mmdit import MMDiT

BACKWARD = 2  # a product's gradients are two products of its size

# FLOP/s of dense products in bf16 and fp16, by part of the device's name, the longer ones first; from NVIDIA's data
# sheets, without sparsity, of the SXM boards where nothing else is said.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of the device at most, where they are known. In fp32 they depend on what TF32 is allowed for: unknown."""
    if precision == "fp32":
        return None
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


@dataclass(frozen=True)
class UsefulFlops:
    """Of the forward pass: matrix products and attention of real tokens, logits of masked tokens.

    A backward pass is twice that, and what is computed again, or for padding, is of no use (PaLM, arXiv 2204.02311,
    appendix B). Norms, activations and the optimizer are left out: they are a percent of it. Frozen parts count as if
    they were trained.
    """

    token: int
    masked_token: int
    latent_token: int
    sample: int
    pair: int  # of a query and a key of one sample

    @classmethod
    def of(cls, model: MMDiT) -> UsefulFlops:
        """By the size of each linear map and the kind of rows it is for; the network may be sharded."""
        config, shape = model.config, model.shape
        rows = {"token": 0, "masked_token": 2 * config.width * shape.vocab_size, "latent_token": 0, "sample": 0}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                rows[_rows_of(name, config.depth)] += 2 * module.in_features * module.out_features
        return cls(**rows, pair=2 * 2 * config.width * config.depth)

    def of_step(self, tokens: int, masked_tokens: int, samples: int, latent_tokens: int, pairs: int) -> float:
        """Forward and backward pass. `latent_tokens` are those of one sample, all else is of the whole step."""
        forward = (
            tokens * self.token
            + masked_tokens * self.masked_token
            + samples * (self.sample + latent_tokens * self.latent_token)
            + pairs * self.pair
        )
        return float((1 + BACKWARD) * forward)


def _rows_of(name: str, depth: int) -> str:
    """What the linear map of this name in a network of `depth` blocks has a row for."""
    parts = name.split(".")
    if parts[0] == "text_out":
        return "masked_token"
    if parts[0] in ("latent_in", "latent_head"):
        return "latent_token"
    if parts[0] == "blocks" and parts[3] != "modulation":
        if parts[2] == "latent":
            return "latent_token"
        read_only = parts[1] == str(depth - 1) and parts[3] != "qkv"  # behind the last attention
        return "masked_token" if read_only else "token"
    return "sample"
