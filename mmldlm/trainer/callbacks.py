"""The callbacks of a run, in their order. To add one, write a subclass of `Callback` and list it here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from mmldlm.config import RunConfig
from mmldlm.distributed.engine import Engine
from mmldlm.telemetry.profiler import StepProfiler
from mmldlm.trainer.replica_check import ReplicaCheck
from mmldlm.trainer.setup import Components
from mmldlm.trainer.step_numbers import StepNumbers
from mmldlm.trainer.validation import Quality, Validation
from mmldlm.utils.callback import Callback

COLLECT_EVERY = 50  # steps; what a step leaves in reference cycles waits as long


class ScheduledCollection(Callback):
    """Garbage is collected at the same steps on all ranks and at no other time, until `close`.

    A collection that Python starts by itself stalls one rank, and all others wait for it. What exists after the first
    step, among it everything that was imported, is no garbage before the end of the run: later collections leave it out
    and thus take milliseconds.
    """

    def __init__(self) -> None:
        self._was_enabled, self._is_first_step = gc.isenabled(), True
        gc.disable()

    def after_step(self, step: int) -> None:
        """Collect garbage if it is due after `step` steps."""
        if self._is_first_step or step % COLLECT_EVERY == 0:
            gc.collect()
        if self._is_first_step:
            gc.freeze()
            self._is_first_step = False

    def close(self) -> None:
        """Leave it to Python again."""
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def build_callbacks(
    config: RunConfig, components: Components, engine: Engine, numbers: StepNumbers, save: Callable[..., None]
) -> list[Callback]:
    """Return the callbacks of a run; `save` starts a checkpoint, see `Trainer.save`."""
    return [
        ReplicaCheck(engine, config.guard.verify_updates_every),
        Validation(config, components, engine, numbers, save),
        Quality(config, components, engine, numbers),
        ScheduledCollection(),
        StepProfiler(config.profile, Path(config.run.dir), engine.rank, engine.device.type),
    ]
