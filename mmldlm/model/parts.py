"""The parts of the network by name: which of them are trained, and which loss reaches which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from torch import nn

Part = Literal[
    "text_encoder",
    "latent_encoder",
    "noise_times",
    "text_stream",
    "latent_stream",
    "text_head",
    "latent_head",
    "length_head",
]
Freezable = Literal[Part, "backbone"]  # backbone: both streams, which are all of the blocks
Loss = Literal["text", "latent", "length"]

_PARTS: dict[str, Part] = {
    "token_embedding": "text_encoder",
    "latent_in": "latent_encoder",
    "latent_position": "latent_encoder",
    "text_time": "noise_times",
    "latent_time": "noise_times",
    "text_out": "text_head",
    "text_final": "text_head",
    "text_head": "text_head",
    "latent_head": "latent_head",
    "latent_skip": "latent_head",
    "latent_final": "latent_head",
    "length_head": "length_head",
}
_SHARED: tuple[Part, ...] = ("text_encoder", "latent_encoder", "noise_times", "text_stream", "latent_stream")

# The parts that a loss has a gradient for: each stream reads the other, the length head only the latents' input.
FEEDS: dict[Loss, tuple[Part, ...]] = {
    "text": (*_SHARED, "text_head"),
    "latent": (*_SHARED, "latent_head"),
    "length": ("latent_encoder", "noise_times", "length_head"),
}


def part_of(name: str) -> Part | Literal["loss_weights"]:
    """The part that the parameter `name` of an `MMDiT` belongs to; learned loss weights are none that can be frozen."""
    root, _, rest = name.partition(".")
    if root == "loss_weights":
        return "loss_weights"
    if root == "blocks":
        return "text_stream" if rest.split(".")[1] == "text" else "latent_stream"
    return _PARTS[root]


def frozen_parts(freeze: Sequence[Freezable]) -> set[Part]:
    """The parts in `freeze`, with `backbone` as the two that it stands for."""
    streams: set[Part] = {"text_stream", "latent_stream"} if "backbone" in freeze else set()
    return streams | {part for part in freeze if part != "backbone"}


def freeze_parts(model: nn.Module, freeze: Sequence[Freezable]) -> None:
    """Take the named parts out of training: their parameters keep the values they have."""
    frozen = frozen_parts(freeze)
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)


def check_trainable(freeze: Sequence[Freezable], losses: Mapping[Loss, str]) -> None:
    """Refuse to leave a loss nothing to train; `losses` has those with weight, and the setting that gives it.

    Raises ValueError that names the loss and the parts of which it needs one.
    """
    frozen = frozen_parts(freeze)
    if frozen.issuperset(get_args(Part)):
        raise ValueError(f"freeze: expected a part left to train, found all of them: {', '.join(freeze)}")
    for loss, setting in losses.items():
        if frozen.issuperset(FEEDS[loss]):
            raise ValueError(
                f"freeze: the {loss} loss ({setting}) needs one of {', '.join(FEEDS[loss])} to train, "
                f"found {', '.join(freeze)} frozen"
            )
