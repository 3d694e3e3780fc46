"""Parameter groups of the optimizer: decayed, not decayed, and the matrices that Muon updates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, weight_decay: float, without: Collection[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Trainable parameters but those in `without`, as two groups: decayed (matrices of linear maps), not decayed."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings |= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("position")}
    left_out = {id(parameter) for parameter in without}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in left_out:
            (decayed if parameter.dim() >= 2 and id(parameter) not in embeddings else plain).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trainable matrices that Muon updates: those of all linear maps within the blocks.

    Embeddings, what takes latents and noise times in, positions, final modulations and heads are AdamW's, as are
    norms and biases (Jordan, kellerjordan.github.io/posts/muon: hidden matrices alone, neither the first layer nor
    the last; arXiv 2502.16982, section 2.1). The fused qkv map is one matrix here, not three.
    """
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.dim() == 2 and parameter.requires_grad
    ]
