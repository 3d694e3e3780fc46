"""The callbacks of a run, in the order of their calls. To add one, subclass `Callback` and list it here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from mmldlm.telemetry.profiler import StepProfiler
from mmldlm.trainer.replica_check import ReplicaCheck
from mmldlm.trainer.step_numbers import StepNumbers
from mmldlm.trainer.validation import Validation
from mmldlm.utils.callback import Callback

COLLECT_EVERY = 50  # steps: reference cycles that a step leaves behind stay in memory this long


class ScheduledCollection(Callback):
    """Collects garbage at the same steps on all ranks, and at no other time until `close`.

    If Python started a collection by itself, it would stall one rank, and all others would wait. Objects that exist
    after the first step live until the end of the run, where the trainer unfreezes them. Later collections skip them.
    """

    def __init__(self) -> None:
        self._was_enabled, self._is_first_step = gc.isenabled(), True
        gc.disable()

    def after_step(self, step: int) -> None:
        if self._is_first_step or step % COLLECT_EVERY == 0:
            gc.collect()
        if self._is_first_step:
            gc.freeze()
            self._is_first_step = False

    def close(self) -> None:
        if self._was_enabled:
            gc.enable()


def build_callbacks(numbers: StepNumbers, save: Callable[..., None]) -> list[Callback]:
    """Return the callbacks of a run. `save` starts a checkpoint, see `Trainer.save`."""
    config, engine = numbers.config, numbers.engine
    return [
        ReplicaCheck(engine, config.guard.verify_updates_every),
        Validation(numbers, save),
        ScheduledCollection(),
        StepProfiler(config.profile, Path(config.run.dir), engine.rank, engine.device.type),
    ]
