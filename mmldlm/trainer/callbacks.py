"""The callbacks of a run, in their order. To add one, write a subclass of `Callback` and list it here."""

from __future__ import annotations

from collections.abc import Callable

from mmldlm.config import RunConfig
from mmldlm.distributed.engine import Engine
from mmldlm.telemetry.profiler import StepProfiler
from mmldlm.trainer.replica_check import ReplicaCheck
from mmldlm.trainer.setup import Components
from mmldlm.trainer.step_log import StepLog
from mmldlm.trainer.validation import Quality, Validation
from mmldlm.utils.callback import Callback
from mmldlm.utils.garbage import ScheduledCollection


def build_callbacks(
    config: RunConfig, components: Components, engine: Engine, log: StepLog, save: Callable[..., None]
) -> list[Callback]:
    """Return the callbacks of a run; `save` starts a checkpoint, see `Trainer.save`."""
    return [
        ReplicaCheck(engine, config.guard.verify_updates_every),
        Validation(config, components, engine, log, save),
        Quality(config, components, engine, log),
        ScheduledCollection(),
        StepProfiler(config.profile, log.run_dir, engine.rank, engine.device.type),
    ]
