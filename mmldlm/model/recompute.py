"""Activation checkpointing: which blocks compute their activations again in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mmldlm.schema import setting

T = TypeVar("T")
Recompute = Literal["none", "full", "selective"]

# Matrix products and attentions, by the names of their operators on all devices; what is not there is not called.
_KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}


@dataclass(frozen=True)
class MemoryConfig:
    activation_checkpointing: Literal["none", "full", "selective", "every_k"] = setting(
        "none",
        "what blocks compute again in backward to save memory; none: nothing; full: everything but their inputs; "
        "selective: all but matrix products and attention; every_k: full, in each k-th block only",
    )
    every_k: int = setting(2, "with every_k: recompute block 0 and each k-th after it", at_least=1)

    def of_block(self, index: int) -> Recompute:
        """What the block at `index`, counted from 0, does."""
        if self.activation_checkpointing == "every_k":
            return "none" if index % self.every_k else "full"
        return self.activation_checkpointing


KEEP_ALL = MemoryConfig()


def recomputed(function: Callable[..., T], kind: Recompute, draws: bool, *args: Any) -> T:
    """`function(*args)`, whose activations are computed again in backward, to the same bits.

    `draws`: the function draws random numbers, which must come again.
    """
    contexts = partial(create_selective_checkpoint_contexts, _policy) if kind == "selective" else noop_context_fn
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=contexts)


def _policy(context: object, operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
