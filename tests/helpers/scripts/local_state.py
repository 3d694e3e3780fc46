"""`mmldlm.train` that looks at the engine's state, each rank at its own.

At the start it fails if a weight is not the initial one, or not that of the safetensors file EXPECTED, at the end if
drawing the state for a checkpoint exchanged anything.
"""

from __future__ import annotations

import math
import os

import torch
from safetensors.torch import load_file
from torch.distributed.tensor.debug import CommDebugMode

from mmldlm.checkpoint.tensors import read_range
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit


class ObservedTrainer(Trainer):
    def _restore(self) -> list[str]:
        notes = super()._restore()
        path = os.environ.get("EXPECTED")
        weights = load_file(path) if path else self.components.initial_weights
        for group, name, tensor, part in self.engine.local_state():
            start, stop = (0, 0) if self.engine.writer is None else tensor.slice_in(self.engine.writer)
            if group == "model" and start < stop:
                assert torch.equal(part.flatten(), read_range(weights, name, start, stop)), name
        return notes

    def save(self, wait: bool = False, validation_loss: float | None = None) -> None:
        engine, written = self.engine, 0
        with CommDebugMode() as observed:
            for _, name, tensor, part in engine.local_state():
                start, stop = (0, 0) if engine.writer is None else tensor.slice_in(engine.writer)
                assert start == stop or part.numel() == stop - start, name
                written += stop - start
            assert not observed.get_total_counts(), observed.get_comm_counts()
            if engine.name == "fsdp2":
                next(engine.unwrapped_model.parameters()).detach().full_tensor()
                assert observed.get_total_counts(), "the exchange of a gather would have been seen"
        sizes = [math.prod(tensor.shape) for _, _, tensor, _ in engine.local_state()]
        assert sum(engine.gather(written, "elements written")) == sum(sizes)
        assert written < 1.2 * sum(sizes) / engine.num_writers, "each writer has about as much"
        super().save(wait, validation_loss)


train_and_exit(ObservedTrainer)
