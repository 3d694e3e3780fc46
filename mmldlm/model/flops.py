"""Model FLOPs of a training step in closed form, and the peak FLOP/s of GPUs, whose ratio is the MFU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from mmldlm.model.mmdit import MMDiT

BACKWARD_FACTOR = 2  # the gradients of a matrix product are two products of its size

# Dense bf16 and fp16 FLOP/s by a part of the device's name, longer parts first. From NVIDIA's data sheets, without
# sparsity; the SXM boards unless the name says otherwise.
PEAK_FLOPS = {
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
    """Return the peak FLOP/s of the device, or None if unknown, as in fp32, where it depends on the use of TF32."""
    if precision == "fp32":
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of a forward pass: matrix products and attention of real tokens, logits of masked tokens.

    A backward pass has twice as many. Recomputation and padding do not count (PaLM, arXiv 2204.02311, appendix B).
    Norms, activations and the optimizer are left out: they are about one percent. Frozen parts count as if they were
    trained.
    """

    token: int
    masked_token: int
    latent_token: int
    sample: int
    pair: int  # a query and a key of the same sample

    @classmethod
    def from_model(cls, model: MMDiT) -> ModelFlops:
        """Count by the size of each linear layer and the kind of its rows; the network may be sharded."""
        config, shape = model.config, model.shape
        # The text head is no `nn.Linear`, since its matrix may be the embedding's: it is counted here.
        flops = {"token": 0, "masked_token": 2 * config.width * shape.vocab_size, "latent_token": 0, "sample": 0}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                flops[_row_kind(name, config.depth)] += 2 * module.in_features * module.out_features
        # Scores and weighted values: two products of `width` multiply-adds for each pair and block.
        return cls(**flops, pair=2 * 2 * config.width * config.depth)

    def step_flops(self, tokens: int, masked_tokens: int, samples: int, latent_tokens: int, pairs: int) -> float:
        """Return the FLOPs of forward and backward pass.

        Args:
            tokens: Text tokens of the step.
            masked_tokens: Tokens that the text head predicts in the step.
            samples: Samples of the step.
            latent_tokens: Latent tokens of one sample.
            pairs: Pairs of query and key in the step, latents among them.
        """
        forward = (
            tokens * self.token
            + masked_tokens * self.masked_token
            + samples * (self.sample + latent_tokens * self.latent_token)
            + pairs * self.pair
        )
        return float((1 + BACKWARD_FACTOR) * forward)


def _row_kind(name: str, depth: int) -> str:
    """Return what the linear layer `name` has one row for, in a network of `depth` blocks."""
    parts = name.split(".")
    if parts[0] == "text_out":
        return "masked_token"
    if parts[0] in ("latent_in", "latent_head"):
        return "latent_token"
    if parts[0] == "blocks" and parts[3] != "modulation":
        if parts[2] == "latent":
            return "latent_token"
        after_last_attention = parts[1] == str(depth - 1) and parts[3] != "qkv"  # runs for predicted tokens alone
        return "masked_token" if after_last_attention else "token"
    return "sample"
