"""Garbage collection at chosen steps: one that Python starts by itself stalls one rank, and all others wait for it."""

from __future__ import annotations

import gc

from mmldlm.utils.callback import Callback

COLLECT_EVERY = 50  # steps; what a step leaves in reference cycles waits as long


class ScheduledCollection(Callback):
    """Garbage is collected at the same steps on all ranks and at no other time, until `close`.

    What exists after the first step, among it everything that was imported, is no garbage before the end of the run:
    later collections leave it out and thus take milliseconds.
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
