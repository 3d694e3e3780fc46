"""`mmldlm.train` with a reference of the weights' average in float64, made of the weights after each step.

SKIPPED=[step, ...], counted from 0, are steps whose loss becomes NaN. Rank 0 writes the reference, whole and by name,
to FACTS=folder. Within a validation and behind it, it is checked which weights the network computes with.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from mmldlm.distributed.engine import Engine
from mmldlm.distributed.zero import ZeroEngine
from mmldlm.trainer.step_numbers import StepResult, StepTotals
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

SKIPPED = json.loads(os.environ["SKIPPED"])
reference: list[torch.Tensor] = []
_averaged = Engine.ema_scope


def masters(engine: Engine) -> list[torch.Tensor]:
    """This rank's part of the weights, in float64."""
    return [master.detach().double() for master in engine._master_params()]


def computed_with(engine: Engine) -> list[torch.Tensor]:
    """This rank's part of what the network's next forward pass is made of."""
    parameters: list[Any] = list(engine.unwrapped_model.parameters())
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in held]


def whole_reference(engine: Engine) -> dict[str, torch.Tensor]:
    """Collective: the reference by name, by way of the weights, which are lost."""
    for master, mean in zip(engine._master_params(), reference, strict=True):
        master.detach().copy_(mean)
    return {
        name: safe_get_full_fp32_param(parameter).clone()
        if isinstance(engine, ZeroEngine)
        else (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in engine._trainable_params()
    }


class ReferenceTrainer(Trainer):
    def __enter__(self) -> ReferenceTrainer:
        super().__enter__()
        reference.extend(masters(self.engine))
        return self

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss * (math.nan if self.state.step in SKIPPED else 1.0))

    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        limit = self.config.ema.decay
        decay = min(limit, (1 + step) / (10 + step)) if self.config.ema.warmup else limit
        if step not in SKIPPED:
            for mean, master in zip(reference, masters(self.engine), strict=True):
                mean.mul_(decay).add_(master, alpha=1 - decay)
        super().end_step(step, totals, result)
        if self.state.step == self.config.train.steps:
            self.save(wait=True)
            whole = whole_reference(self.engine)
            if self.engine.is_main:
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


Engine.ema_scope = averaged  # type: ignore[method-assign]
train_and_exit(ReferenceTrainer)
