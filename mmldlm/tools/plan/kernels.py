"""The kernels of a training step, recorded on fake tensors, and their time at given rates (a roofline)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmldlm.trainer.memory_tracker import FLOP_FORMULAS

# Bytes for each parameter: fused AdamW reads and writes weight, gradient and moments, clipping the gradient.
UPDATE_BYTES = 28 + 12

Phase = Literal["forward", "backward"]
Kind = Literal["product", "attention", "other"]

_INDEXED = {"index_select", "embedding", "nll_loss_forward"}  # read as much of their table as they have indices for
_NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach"}


@dataclass(frozen=True)
class Rates:
    """What a device reaches: FLOP/s, bytes/s of element-wise kernels, seconds from one small kernel to the next."""

    product: float
    attention_forward: float
    attention_backward: float
    traffic: float
    launch_s: float


@dataclass(frozen=True)
class Access:
    """A tensor that a kernel reads or writes."""

    storage: int
    key: tuple[Any, ...]  # part of the storage
    size: int  # bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Access:
        numel = 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            numel *= length if stride else 1  # expanded dimensions are read once
        key = (tensor.storage_offset(), tuple(tensor.shape))
        return cls(tensor.untyped_storage()._cdata, key, numel * tensor.element_size())


@dataclass(frozen=True)
class Kernel:
    """An operator, or several in one pass over memory."""

    phase: Phase
    kind: Kind
    name: str
    flops: float
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]

    @property
    def traffic(self) -> int:
        """Bytes that it reads and writes."""
        return sum(access.size for access in (*self.reads, *self.writes))

    def seconds(self, rates: Rates) -> float:
        """Its time by the roofline."""
        attention = rates.attention_forward if self.phase == "forward" else rates.attention_backward
        rate = attention if self.kind == "attention" else rates.product
        return max(self.flops / rate, self.traffic / rates.traffic, rates.launch_s)


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the kernels of a step on fake tensors.

    Args:
        attention_flops: FLOPs of a forward call of an attention that is one kernel for the micro-batch, which only the
            lengths tell; None for one that is counted by the shapes of its arguments, as on a CPU.
    """

    def __init__(self, attention_flops: float | None = None):
        super().__init__()
        self.attention_flops, self.phase, self.kernels = attention_flops, "forward", list[Kernel]()
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func.is_view or name in _NO_KERNEL or not results:
            return out
        inputs = args[1:] if name in ("copy_", "fill_", "zero_") else args
        given = {key: value for key, value in kwargs.items() if key not in ("out", "grad_input")}
        tensors = [leaf for leaf in tree_leaves((inputs, given)) if isinstance(leaf, Tensor)]
        if name.endswith(("zeros_like", "ones_like", "full_like")) or name.startswith("new_"):
            tensors = []
        self._alive += tensors + results
        kind: Kind = "other"
        flops = 0.0
        if "attn" in name or "attention" in name:
            # Backward computes the scores again: five products for two (FlashAttention-2, arXiv 2307.08691).
            kind = "attention"
            if self.attention_flops is not None:
                flops = self.attention_flops * (1.0 if self.phase == "forward" else 2.5)
            elif packet in FLOP_FORMULAS:
                flops = FLOP_FORMULAS[packet](*args, **kwargs, out_val=out)
        elif packet in FLOP_FORMULAS:
            kind, flops = "product", FLOP_FORMULAS[packet](*args, **kwargs, out_val=out)
        reads, writes = ([*dict.fromkeys(map(Access.of, part))] for part in (tensors, results))
        if name in _INDEXED:
            reads[0] = replace(reads[0], size=min(reads[0].size, writes[0].size))
        self.kernels.append(Kernel(self.phase, kind, name, flops, tuple(reads), tuple(writes)))  # type: ignore[arg-type]
        return out
