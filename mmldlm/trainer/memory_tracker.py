"""FLOPs and memory of training, counted from the operators that it calls; fake tensors cost what real ones do."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmldlm.diffusion.objective import NoisedBatch, Objective
from mmldlm.model.mmdit import MMDiT

# update: temporaries of the optimizer step
Kind = Literal["weights", "ema", "gradients", "moments", "batches", "activations", "update"]

_ATEN = torch.ops.aten
_FLOP_FORMULAS = {  # PyTorch has none for attention on the CPU, where the fake tensors are
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}


class CostTracker(TorchDispatchMode):
    """Dispatch mode that counts FLOPs of matrix products and tracks memory from its allocation until it is freed.

    PyTorch's `FlopCounterMode` has the same formulas, but its hooks keep tensors alive that checkpointing frees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.kind: Kind = "activations"  # kind of new allocations
        self._allocation: dict[int, int] = {}  # live storage -> index of its allocation
        # Changes refer to allocations, not kinds: `set_kind` may relabel memory after its allocation.
        self._kinds: list[Kind] = []  # by allocation
        self._changes: list[tuple[int, int]] = []  # (allocation, bytes), with negative bytes when it is freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FLOP_FORMULAS:
            self.flops += _FLOP_FORMULAS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._track(tensor.untyped_storage())
        return out

    def set_kind(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """Set the kind of the memory of `tensors`, whether it has been tracked before or not."""
        for tensor in tensors:
            self._kinds[self._track(tensor.untyped_storage())] = kind

    def _track(self, storage: torch.UntypedStorage) -> int:
        """Return the index of a storage's allocation; track it until it is freed if it is new."""
        # An address, which a later storage may reuse: `_free` forgets it.
        key = storage._cdata
        if key not in self._allocation:
            allocation, size = len(self._kinds), storage.nbytes()
            self._allocation[key] = allocation
            self._kinds.append(self.kind)
            self._changes.append((allocation, size))
            weakref.finalize(storage, self._free, key, allocation, size)
        return self._allocation[key]

    def _free(self, key: int, allocation: int, size: int) -> None:
        del self._allocation[key]
        self._changes.append((allocation, -size))

    def peak(self, *kinds: Kind) -> dict[Kind, int]:
        """Return the bytes of each of `kinds` (default: all) at the time when their sum is largest."""
        current, peak_total, peak = Counter[Kind](), 0, Counter[Kind]()
        for allocation, size in self._changes:
            kind = self._kinds[allocation]
            if not kinds or kind in kinds:
                current[kind] += size
                if current.total() > peak_total:
                    peak_total, peak = current.total(), current.copy()
        return dict(peak)


class StepTracker:
    """Tracker of optimizer steps, which are called in the order of the trainer."""

    def __init__(self, model: MMDiT, objective: Objective):
        self.model, self.objective = model, objective
        self.costs = CostTracker()
        self.costs.set_kind("weights", [*model.parameters(), *model.buffers()])
        self._label_gradients()

    def micro_batches(self, noised: Sequence[NoisedBatch]) -> int:
        """Run forward and backward of a step's micro-batches; return their FLOPs."""
        before = self.costs.flops
        # All micro-batches first: they are in memory together, as in `Trainer.accumulate`.
        for batch in noised:
            self.costs.set_kind("batches", _tensors(batch))
        for batch in noised:
            with self._tracking("activations"):
                loss, _ = self.objective(self.model, batch, batch.counts.tolist())
                loss.backward()
            self._label_gradients()
        return self.costs.flops - before

    def update(self, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        """Clip the gradients, step the optimizer and clear the gradients."""
        with self._tracking("update"):
            # As in `Engine.update`, the norm is also computed without clipping.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        # The first step allocates the moments as `update`, so they are relabeled.
        values = (value for state in optimizer.state.values() for value in state.values())
        self.costs.set_kind("moments", (value for value in values if isinstance(value, Tensor)))

    def allocate_gradients(self) -> None:
        """Allocate gradients as an earlier micro-batch of the step leaves them."""
        with self._tracking("gradients"):
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _label_gradients(self) -> None:
        gradients = (parameter.grad for parameter in self.model.parameters())
        self.costs.set_kind("gradients", (gradient for gradient in gradients if gradient is not None))

    @contextmanager
    def _tracking(self, kind: Kind) -> Iterator[None]:
        """Track new allocations as `kind`, under the fake mode of the model's parameters if they have one."""
        self.costs.kind = kind
        with getattr(next(self.model.parameters()), "fake_mode", nullcontext()), self.costs:
            yield


def _tensors(batch: NoisedBatch) -> list[Tensor]:
    """Return all tensors of a batch, after creating its index tensors, which must not happen under the fake mode."""
    layout = batch.layout
    values = [*vars(batch).values(), layout.sample_of_token, layout.position, layout.sample_of_latent]
    _ = layout.groups
    return [value for value in values if isinstance(value, Tensor)]
