"""`mmldlm.train` beside a reference of the weights' average in float64, made of the weights after each step.

SKIPPED=[step, ...], counted from 0, are steps whose loss becomes NaN. Rank 0 writes the reference, whole and by name,
to FACTS=folder. Within a validation and behind it, it is checked which weights the network computes with.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from mmldlm import train
from mmldlm.distributed.engine import Engine
from mmldlm.trainer.trainer import Trainer

SKIPPED = json.loads(os.environ["SKIPPED"])
reference: list[torch.Tensor] = []
_open, _backward, _finish_step, _averaged = Trainer._open, Trainer.backward, Trainer.finish_step, Engine.ema_scope


def masters(runtime: Engine) -> list[torch.Tensor]:
    """This rank's part of the weights, in float64."""
    return [master.detach().double() for master in runtime._master_params()]


def computed_with(runtime: Engine) -> list[torch.Tensor]:
    """This rank's part of what the network's next forward pass is made of."""
    parameters: list[Any] = list(runtime.unwrapped_model.parameters())
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in held]


def whole_reference(runtime: Engine) -> dict[str, torch.Tensor]:
    """Collective: the reference by name, by way of the weights, which are lost."""
    for master, mean in zip(runtime._master_params(), reference, strict=True):
        master.detach().copy_(mean)
    return {name: runtime._get_master(parameter).detach().clone() for name, parameter in runtime._trainable_params()}


def opened(self: Trainer) -> None:
    _open(self)
    reference.extend(masters(self.runtime))


def backward(self: Trainer, loss: torch.Tensor) -> None:
    _backward(self, loss * (math.nan if self.state.step in SKIPPED else 1.0))


def finish_step(self: Trainer, lr: float, norm: torch.Tensor, micro_batches: list[Any]) -> None:
    step, limit = self.state.step, self.config.ema.decay
    decay = min(limit, (1 + step) / (10 + step)) if self.config.ema.warmup else limit
    if step not in SKIPPED:
        for mean, master in zip(reference, masters(self.runtime), strict=True):
            mean.mul_(decay).add_(master, alpha=1 - decay)
    _finish_step(self, lr, norm, micro_batches)
    if self.state.step == self.config.train.steps:
        self.save(wait=True)
        whole = whole_reference(self.runtime)
        if self.runtime.is_main:
            save_file(whole, Path(os.environ["FACTS"]) / "reference.safetensors")


@contextlib.contextmanager
def averaged(self: Engine) -> Iterator[None]:
    before, trained = computed_with(self), masters(self)
    with _averaged(self):
        for mean, master in zip(reference, masters(self), strict=True):
            assert torch.allclose(master, mean, rtol=1e-5, atol=1e-7)
        assert not all(map(torch.equal, before, computed_with(self))), "the network computes with the trained weights"
        yield
    assert all(map(torch.equal, before, computed_with(self))), "the network computes with other weights than before"
    assert all(map(torch.equal, trained, masters(self)))


Trainer._open, Trainer.backward, Trainer.finish_step = opened, backward, finish_step  # type: ignore[method-assign]
Engine.ema_scope = averaged  # type: ignore[method-assign]
status = train.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
