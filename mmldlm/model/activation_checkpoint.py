"""Activation checkpointing: which blocks recompute their activations in backward instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmldlm.settings.declaration import setting

CheckpointingMode = Literal["none", "full", "selective"]
WRAPPED_METHOD = {"full": "forward", "selective": "attention"}  # methods of `MMDiTBlock`


@dataclass(frozen=True)
class MemoryConfig:
    """Settings that trade time for memory."""

    activation_checkpointing: Literal["none", "full", "selective", "every_k"] = setting(
        "none",
        "activations that blocks recompute in backward to save memory. none: nothing. selective: the attention "
        "with its norms. full: everything but the block's inputs. every_k: full, in every k-th block only. The "
        "last kept_blocks recompute nothing",
        advice="none as long as the micro-batch fits, then selective, then full: [performance.md](performance.md)",
    )
    every_k: int = setting(2, "every_k: recompute block 0 and every k-th after it", at_least=1)
    kept_blocks: int = setting(
        1,
        "number of last blocks that recompute nothing. The last block costs no memory, since its backward comes "
        "first. Each block before it costs its activations, and saves recomputing them",
        at_least=1,
        advice="With full, raise it as far as memory allows",
    )
    keep_freed: bool = setting(
        True,
        "on a CPU with glibc, keep memory that a step frees for the next step, which is faster. MALLOC_ "
        "environment variables take precedence",
    )

    def mode_for_block(self, index: int, depth: int) -> CheckpointingMode:
        """Return the mode of the block at `index`, counted from 0, in a network of `depth` blocks."""
        # The last block's backward comes first: it would recompute everything before any other memory is freed.
        if index >= depth - self.kept_blocks:
            return "none"
        if self.activation_checkpointing == "every_k":
            return "none" if index % self.every_k else "full"
        return self.activation_checkpointing


KEEP_ALL = MemoryConfig()


class Recomputed:
    """A method of a block. While the block trains, backward recomputes the method's activations, bit for bit."""

    def __init__(self, block: nn.Module, method: str, uses_rng: bool):
        self.block, self.function, self.uses_rng = block, getattr(block, method), uses_rng

    def __call__(self, *args: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.function(*args)
        return checkpoint(self.function, *args, use_reentrant=False, preserve_rng_state=self.uses_rng)


def checkpoint_blocks(blocks: nn.ModuleList, memory: MemoryConfig, uses_rng: bool) -> None:
    """Wrap methods of the blocks so that their activations are recomputed in backward.

    The module's hooks surround a wrapped `forward`, so the hooks of an engine do not run again in backward. `uses_rng`
    says that `forward` draws random numbers, for example in dropout: the recomputation then repeats them.
    """
    for index, block in enumerate(blocks):
        method = WRAPPED_METHOD.get(memory.mode_for_block(index, len(blocks)))
        if method is not None:
            # `attention` has no dropout, so only `forward` must restore the generator's state.
            setattr(block, method, Recomputed(block, method, uses_rng and method == "forward"))
            block.keeps_inputs_alone = method == "forward"  # type: ignore[assignment]
