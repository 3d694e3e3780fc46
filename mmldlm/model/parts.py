"""Named parts of the network: which parts are frozen, and which loss trains which part."""

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
Freezable = Literal[Part, "backbone"]  # backbone: both streams, that is all blocks
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

# Parts that get a gradient from a loss. The streams attend to each other. The length head sees only the input latents.
PARTS_TRAINED_BY: dict[Loss, tuple[Part, ...]] = {
    "text": (*_SHARED, "text_head"),
    "latent": (*_SHARED, "latent_head"),
    "length": ("latent_encoder", "noise_times", "length_head"),
}


def part_of(name: str) -> Part | Literal["loss_weights"]:
    """Return the part that parameter `name` of an `MMDiT` belongs to. Learned loss weights cannot be frozen."""
    root, _, rest = name.partition(".")
    if root == "loss_weights":
        return "loss_weights"
    if root == "blocks":
        return "text_stream" if rest.split(".")[1] == "text" else "latent_stream"
    return _PARTS[root]


def frozen_parts(freeze: Sequence[Freezable]) -> set[Part]:
    """Return the parts in `freeze`, with `backbone` expanded to both streams."""
    streams: set[Part] = {"text_stream", "latent_stream"} if "backbone" in freeze else set()
    return streams | {part for part in freeze if part != "backbone"}


def freeze_parts(model: nn.Module, freeze: Sequence[Freezable]) -> None:
    """Exclude the named parts from training: their parameters keep their values."""
    frozen = frozen_parts(freeze)
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)


def check_trainable(freeze: Sequence[Freezable], losses: Mapping[Loss, str]) -> None:
    """Check that every loss has a part left to train.

    Args:
        losses: The losses with a weight above 0, and for each the setting that gives the weight.

    Raises:
        ValueError: All parts that a loss trains are frozen. The message names the loss and these parts.
    """
    frozen = frozen_parts(freeze)
    if frozen.issuperset(get_args(Part)):
        raise ValueError(f"freeze: expected a part left to train, found all parts frozen: {', '.join(freeze)}")
    for loss, setting in losses.items():
        if frozen.issuperset(PARTS_TRAINED_BY[loss]):
            raise ValueError(
                f"freeze: the {loss} loss ({setting}) needs one of {', '.join(PARTS_TRAINED_BY[loss])} to train, "
                f"found {', '.join(freeze)} frozen"
            )
