"""Activation checkpointing: which blocks recompute their activations in backward instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch.utils.checkpoint import checkpoint

from mmldlm.settings.fields import setting

T = TypeVar("T")
CheckpointingMode = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class MemoryConfig:
    """Settings that trade time for memory."""

    activation_checkpointing: Literal["none", "full", "selective", "every_k"] = setting(
        "none",
        "what blocks recompute in backward to save memory, all but the last (see kept_blocks); none: nothing; "
        "full: everything but their inputs and outputs; selective: the attention with its norms; "
        "every_k: full, in every k-th block only",
        advice="none as long as the micro-batch fits, then selective, then full: [performance.md](performance.md)",
    )
    every_k: int = setting(2, "every_k: recompute block 0 and every k-th after it", at_least=1)
    kept_blocks: int = setting(
        1,
        "number of last blocks that recompute nothing. The last costs no memory, since its backward comes first; "
        "each one before it costs its activations and saves their recomputation",
        at_least=1,
        advice="With full, raise it as far as memory allows: the activations of a kept block are not recomputed",
    )
    keep_freed: bool = setting(
        True,
        "on a CPU with glibc, the process keeps memory that a step frees for the next one, which is faster; "
        "MALLOC_ environment variables take precedence",
    )

    def mode_for_block(self, index: int, depth: int) -> CheckpointingMode:
        """Return the mode of the block at `index`, counted from 0, in a network of `depth` blocks."""
        # The last block's backward comes first: it would recompute all it had freed before anything else is freed.
        if index >= depth - self.kept_blocks:
            return "none"
        if self.activation_checkpointing == "every_k":
            return "none" if index % self.every_k else "full"
        return self.activation_checkpointing


KEEP_ALL = MemoryConfig()


def checkpoint_activations(function: Callable[..., T], preserve_rng_state: bool, *args: Any) -> T:
    """Return `function(*args)`, whose activations are recomputed in backward, bit for bit.

    Args:
        function: computes tensors from `args`.
        preserve_rng_state: whether the function draws random numbers, as dropout does, which the recomputation repeats.
        args: its arguments.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
