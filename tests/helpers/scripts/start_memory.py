"""`mmldlm.train` that fails if a rank has had more than its part of the weights in memory at the start."""

from __future__ import annotations

import math
import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that operators have made and that are alive, and the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._tracked: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors that it consists of
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
                self._track(tensor)
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._tracked:
            return
        self._tracked.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._tracked.remove(key)
        self.now -= size


class ObservedTrainer(Trainer):
    def _restore(self) -> list[str]:
        engine: Any = self.engine
        peaks = []
        with LiveMemory() as memory:
            if engine.name == "zero3":
                materialize = engine._materialize  # what follows allocates buffers of a fixed size

                def observed(model: Any) -> None:
                    materialize(model)
                    peaks.append(memory.peak)

                engine._materialize = observed
            notes = super()._restore()
            peaks.append(memory.peak)
        sizes = [4 * math.prod(tensor.shape) for tensor in self.components.initial_weights.meta().values()]
        share, bound = sum(sizes) / engine.world_size, 1.3 * sum(sizes) / engine.world_size + 2 * max(sizes)
        assert share <= peaks[0] < bound < sum(sizes), (share, peaks, bound, sum(sizes))
        return notes


train_and_exit(ObservedTrainer)
