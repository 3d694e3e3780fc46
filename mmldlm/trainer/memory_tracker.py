"""What training computes and the memory it takes, seen from the operators that it calls.

Runs on fake tensors too, which have shapes but no memory: so `mmldlm train --dry-run` knows the costs of a run.
"""

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

# ema: the average of the weights; update: what it needs meanwhile
Kind = Literal["weights", "ema", "gradients", "moments", "batches", "activations", "update"]

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm}
_FORMULAS = {  # PyTorch has none for attention on the CPU, where the fake tensors lie
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_flash_attention_backward
    ],
    **flop_registry,
}


class Costs(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, and follows the memory that operators ask for until it is free again.

    PyTorch's `FlopCounterMode` has the same formulas, but its hooks keep what is recomputed alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.products_in_half: set[tuple[Any, ...]] = set()  # (kind at the time, sizes, all else they differ by)
        self.kind: Kind = "activations"  # of what is allocated from here on
        self._allocation: dict[int, int] = {}  # of the memory that is there now
        self._kinds: list[Kind] = []  # of each allocation
        self._changes: list[tuple[int, int]] = []  # (allocation, bytes) of each allocation and, negative, its end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _FORMULAS:
            self.flops += _FORMULAS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        if func.overloadpacket in _PRODUCTS and out.dtype in (torch.bfloat16, torch.float16):
            sizes = tuple(size for factor in args for size in factor.shape)
            others = (func.overloadpacket, *(factor.stride() for factor in args), *(kwargs or {}).items())
            self.products_in_half.add((self.kind, sizes, others))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def are(self, kind: Kind, tensors: Iterable[Tensor]) -> None:
        """The memory of these tensors, met before or not, is of this kind."""
        for tensor in tensors:
            self._kinds[self._meet(tensor.untyped_storage())] = kind

    def _meet(self, storage: torch.UntypedStorage) -> int:
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
        """Bytes of each of these kinds, or of all, when together they are the most."""
        now, most, at_most = Counter[Kind](), 0, Counter[Kind]()
        for allocation, size in self._changes:
            kind = self._kinds[allocation]
            if not kinds or kind in kinds:
                now[kind] += size
                if now.total() > most:
                    most, at_most = now.total(), now.copy()
        return dict(at_most)


class StepCosts:
    """Optimizer steps, called as the trainer calls them, and what they cost.

    `model` may have fake tensors. In DDP's buckets `gradients_stay` from step to step. `ema`: an average of the trained
    weights lies beside them, whose update needs no memory of its own.
    """

    def __init__(self, model: MMDiT, objective: Objective, gradients_stay: bool = False, ema: bool = False):
        self.model, self.objective, self.gradients_stay = model, objective, gradients_stay
        self.costs = Costs()
        self.costs.are("weights", [*model.parameters(), *model.buffers()])
        with self._watched("ema"):
            trained = model.parameters() if ema else ()
            self._average = [torch.zeros_like(parameter) for parameter in trained if parameter.requires_grad]
        self._name_gradients()
        if gradients_stay:
            self._begin_gradients()

    def micro_batches(self, noised: Sequence[NoisedBatch]) -> int:
        """FLOPs of their forwards and backwards."""
        before = self.costs.flops
        for batch in noised:
            self.costs.are("batches", _tensors(batch))
        for batch in noised:
            with self._watched("activations"):
                loss, _ = self.objective(self.model, batch, batch.counts.tolist())
                loss.backward()
            self._name_gradients()
        return self.costs.flops - before

    def update(self, optimizer: torch.optim.Optimizer, clip_norm: float) -> None:
        with self._watched("update"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not self.gradients_stay)
        values = (value for state in optimizer.state.values() for value in state.values())
        self.costs.are("moments", (value for value in values if isinstance(value, Tensor)))

    def make_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """As a first step does, so that all steps to come have them from the beginning."""
        self._begin_gradients()
        self.update(optimizer, 0.0)

    def _begin_gradients(self) -> None:
        with self._watched("gradients"):
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def _name_gradients(self) -> None:
        gradients = (parameter.grad for parameter in self.model.parameters())
        self.costs.are("gradients", (gradient for gradient in gradients if gradient is not None))

    @contextmanager
    def _watched(self, kind: Kind) -> Iterator[None]:
        self.costs.kind = kind
        with getattr(next(self.model.parameters()), "fake_mode", nullcontext()), self.costs:
            yield


def _tensors(batch: NoisedBatch) -> list[Tensor]:
    """All of a batch; its index tensors are made now, which must not be under the fake mode."""
    layout = batch.layout
    found = [*vars(batch).values(), layout.sample_of_token, layout.position, layout.sample_of_latent]
    _ = layout.groups
    return [value for value in found if isinstance(value, Tensor)]


def micro_batch_cost(model: MMDiT, objective: Objective, noised: NoisedBatch) -> tuple[int, int]:
    """(FLOPs of forward and backward, bytes of activations at their peak) of one micro-batch.

    `model` may have fake tensors; its gradients, of before or new, are no activations.
    """
    steps = StepCosts(model, objective)
    steps.micro_batches([noised])
    return steps.costs.flops, steps.costs.peak("activations").get("activations", 0)


__all__ = ["Costs", "Kind", "StepCosts", "micro_batch_cost"]
