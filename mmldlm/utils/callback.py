"""`Callback`: what a run does beside its steps."""

from __future__ import annotations


class Callback:
    """A feature of a run; subclasses implement what they need.

    All ranks call the methods of all callbacks in the order of `mmldlm.trainer.callbacks`, so they may be collective.
    Steps are counted from 1. What belongs in a checkpoint is in the run's `TrainState`.
    """

    def before_step(self, step: int) -> None:
        """Prepare for a step, before its first micro-batch is used."""

    def before_update(self, step: int) -> None:
        """Read the gradients of a step, before they are clipped; `Engine.gradients` yields them."""

    def after_step(self, step: int) -> None:
        """Act on a step, whose update is made and whose record is written, before a checkpoint has it."""

    def close(self) -> None:
        """Release what the callback holds, also after an error; not collective."""
