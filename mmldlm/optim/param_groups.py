"""Parameter groups of the optimizer: with weight decay, without it, and the matrices that Muon updates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, weight_decay: float, exclude: Collection[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Return the trainable parameters as two groups: with weight decay (matrices of linear layers) and without it.

    Parameters in `exclude` belong to neither.
    """
    # 2-D, but no matrices of linear layers: the token embedding, also where it is a tied head, and latent positions.
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embeddings |= {id(parameter) for name, parameter in model.named_parameters() if name.endswith("position")}
    excluded = {id(parameter) for parameter in exclude}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in excluded:
            (decayed if parameter.dim() >= 2 and id(parameter) not in embeddings else plain).append(parameter)
    pairs = (decayed, weight_decay), (plain, 0.0)
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in pairs if parameters]


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices that Muon updates: the weights of all linear layers within the blocks.

    AdamW updates embeddings, the input layers of latents and noise times, positions, final modulations, heads, norms
    and biases (Jordan, kellerjordan.github.io/posts/muon: hidden matrices only, neither the first layer nor the last;
    arXiv 2502.16982, section 2.1). The fused qkv projection counts as one matrix, not three.
    """
    return [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.dim() == 2 and parameter.requires_grad
    ]
