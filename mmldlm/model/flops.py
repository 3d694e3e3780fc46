"""Model FLOPs of a training step in closed form, and the peak FLOP/s of GPUs. The ratio of both is the MFU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mmldlm.model.mmdit import MMDiT

BACKWARD_FACTOR = 2  # the gradients of a matrix product are two products of its size

# Dense FLOP/s (without sparsity) of matrix products in bf16 and fp16 with sums in fp32, by CUDA's name of the device.
# The numbers come from NVIDIA's data sheets and, for GeForce, from the white papers of the architectures.
_PEAK_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA GH200 120GB": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 3090 Ti": 80e12,
    "NVIDIA GeForce RTX 4080": 97.5e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5080": 112.6e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM5
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "NVIDIA RTX A6000": 154.8e12,
}
# These GPUs have no bf16.
_PEAK_FLOPS_FP16 = {
    "Tesla T4": 65e12,
    "Tesla V100-PCIE-16GB": 112e12,
    "Tesla V100-PCIE-32GB": 112e12,
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "Tesla V100S-PCIE-32GB": 130e12,
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the device of exactly this name, or None if it is unknown.

    It is unknown for a part of a GPU (MIG), for example, and in fp32, where it depends on the use of TF32.
    """
    tables = {"fp32": {}, "bf16": _PEAK_FLOPS, "fp16": _PEAK_FLOPS | _PEAK_FLOPS_FP16}
    return tables[precision].get(device_name)


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of a forward pass: matrix products and attention of real tokens, logits of masked tokens.

    A backward pass has twice the FLOPs. Recomputation and padding do not count (PaLM, arXiv 2204.02311, appendix B). We
    leave out norms, activations and the optimizer, which are about one percent. Frozen parts count like trained ones.
    """

    token: int
    masked_token: int
    latent_token: int
    sample: int
    pair: int  # a query and a key of the same sample

    @classmethod
    def from_model(cls, model: MMDiT) -> ModelFlops:
        """Count by the size of each linear layer and the kind of its rows. The network may be sharded."""
        config, shape = model.config, model.shape
        # We count the text head here. It is no `nn.Linear`, since it may share the matrix of the embedding.
        flops = {"token": 0, "masked_token": 2 * config.width * shape.vocab_size, "latent_token": 0, "sample": 0}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                flops[_row_kind(name, config.depth)] += 2 * module.in_features * module.out_features
        # Scores and weighted values: two products of `width` multiply-adds for each pair and block.
        return cls(**flops, pair=2 * 2 * config.width * config.depth)

    def step_flops(self, tokens: float, masked_tokens: float, samples: int, latent_tokens: int, pairs: float) -> float:
        """Return the FLOPs of forward and backward pass.

        The text head predicts `masked_tokens`. A sample has `latent_tokens`. `pairs` of query and key include latents.
        """
        forward = (
            tokens * self.token
            + masked_tokens * self.masked_token
            + samples * (self.sample + latent_tokens * self.latent_token)
            + pairs * self.pair
        )
        return float((1 + BACKWARD_FACTOR) * forward)


def _row_kind(name: str, depth: int) -> str:
    """Return the kind of the rows of linear layer `name`, in a network of `depth` blocks."""
    parts = name.split(".")
    if parts[0] == "text_out":
        return "masked_token"
    if parts[0] in ("latent_in", "latent_head") or parts[:2] == ["length_head", "hidden"]:
        return "latent_token"
    if parts[0] == "blocks" and parts[3] != "modulation":
        if parts[2] == "latent":
            return "latent_token"
        after_last_attention = parts[1] == str(depth - 1) and parts[3] != "qkv"  # only predicted tokens get that far
        return "masked_token" if after_last_attention else "token"
    return "sample"
