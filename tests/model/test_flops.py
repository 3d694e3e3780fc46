"""Useful FLOPs in closed form match those that PyTorch counts in a forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.model.flops import ModelFlops, peak_flops
from tests.helpers.small_model import VOCAB, random_inputs, small_model

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("latent_tokens", "config"),
    [
        (1, {}),
        (3, {"mlp": "gelu", "modulation_rank": 0, "latent_width": 16}),
        (2, {"tie_embeddings": True, "depth": 3, "num_heads": 4}),
    ],
)
def test_forward_flops_match_the_closed_form(latent_tokens: int, config: dict[str, object]) -> None:
    model = small_model(latent_tokens, **config).eval()
    inputs, of = random_inputs((3, 7, 7, 16), latent_tokens), ModelFlops.from_model(model)
    layout, counted = inputs.layout, []
    for masked in (torch.tensor([0, 2, 5, 20]), torch.arange(layout.num_tokens), torch.arange(0)):
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # whose products are counted one by one
            model(inputs.tokens, inputs.latents, inputs.t_text, inputs.t_latent, layout, masked)
        result = of.step_flops(layout.num_tokens, len(masked), layout.num_samples, latent_tokens, layout.num_pairs)
        assert result == 3 * counter.get_total_flops()
        counted.append(counter.get_total_flops())
    last_block = sum(
        module.weight.numel() for module in (model.blocks[-1].text.out, *model.blocks[-1].text.mlp.children())
    )
    assert counted[1] - counted[2] == layout.num_tokens * 2 * (32 * 32 + 32 * VOCAB + last_block)
    assert layout.num_pairs == sum((length + latent_tokens) ** 2 for length in (3, 7, 7, 16))


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA H200", "fp32", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H2000", "bf16", None),
        ("some other", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peak_flops_by_device_name(name: str, precision: str, expected: float | None) -> None:
    assert peak_flops(name, precision) == expected
