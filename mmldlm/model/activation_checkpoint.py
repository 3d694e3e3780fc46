"""Activation checkpointing: which blocks compute their activations again in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch.utils.checkpoint import checkpoint

from mmldlm.settings.fields import setting

T = TypeVar("T")
Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class MemoryConfig:
    activation_checkpointing: Literal["none", "full", "selective", "every_k"] = setting(
        "none",
        "what blocks compute again in backward to save memory, all but the last (see kept_blocks); none: nothing; "
        "full: everything but their inputs and results; selective: their attention, with its norms; "
        "every_k: full, in each k-th block only",
    )
    every_k: int = setting(2, "with every_k: recompute block 0 and each k-th after it", at_least=1)
    kept_blocks: int = setting(
        1,
        "how many of the last blocks compute nothing again. The last costs no memory, since its backward comes first; "
        "each before it costs its activations, and saves their recomputation",
        at_least=1,
    )
    keep_freed: bool = setting(
        True,
        "on a CPU with glibc, memory that a step frees stays with the process for the next one, which is faster; "
        "MALLOC_ variables of the environment go before",
    )

    def of_block(self, index: int, depth: int) -> Recompute:
        """What the block at `index` of `depth`, counted from 0, does."""
        if index >= depth - self.kept_blocks:  # all that the last would give up comes back before anything else goes
            return "none"
        if self.activation_checkpointing == "every_k":
            return "none" if index % self.every_k else "full"
        return self.activation_checkpointing


KEEP_ALL = MemoryConfig()


def recomputed(function: Callable[..., T], draws: bool, *args: Any) -> T:
    """`function(*args)`, whose activations are computed again in backward, to the same bits.

    `draws`: the function draws random numbers, which must come again.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)
