"""`mmldlm.train` that fetches numbers of steps as on a GPU and records where the host reads a tensor: FACTS=folder.

On a GPU each of those reads would wait for all that the device still has to do. What precedes the forward pass is left
out: there all tensors are the host's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.trainer.trainer import Trainer

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.masked_select, aten._unique2}
METHODS = {getattr(torch.Tensor, name) for name in ("cpu", "numpy", "tolist", "item", "__float__", "__bool__")}
USED = torch.int32  # in backward: which parameters DDP has seen, a list that it has on the host under every device
reads: dict[int, list[str]] = {}
step, verb = 0, ""


class Operations(TorchDispatchMode):
    """The reads that PyTorch itself does, wherever it does them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it does the same with what it holds
        if function.overloadpacket in READS and not (verb == "backward" and args[0].dtype == USED):
            reads[step].append(f"{verb}: {function}")
        return function(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """The reads that our code requests; on a CPU some of them dispatch no operation."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # In words; else it is the device of another tensor. A copy that does not block is read once it has happened.
        to_host = function is torch.Tensor.to and "cpu" in args[1:] and "non_blocking" not in (kwargs or {})
        if (function in METHODS or to_host) and args[0].is_floating_point():
            reads[step].append(f"{verb}: {function}")
        return function(*args, **(kwargs or {}))


def watched(name: str) -> Callable[..., Any]:
    """Return the method of `Trainer` such that reads on the host are recorded."""
    method = getattr(Trainer, name)

    def watch(self: Trainer, *arguments: Any) -> Any:
        global step, verb
        step, verb = self.state.step + 1, name
        reads.setdefault(step, [])
        with Operations(), Methods():
            return method(self, *arguments)

    return watch


class WatchedTrainer(Trainer):
    loss, backward, update, end_step = map(watched, ("loss", "backward", "update", "end_step"))

    def __enter__(self) -> WatchedTrainer:
        super().__enter__()
        self.numbers.defer_fetch = True
        return self


status = train.main(trainer_cls=WatchedTrainer)
(Path(os.environ["FACTS"]) / f"reads.rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(reads))
exit_process(status)
