"""`Callback`: base class of everything that a run does beside its steps, such as validation or profiling."""

from __future__ import annotations


class Callback:
    """Base class of a run's features. Override the methods that you need.

    All ranks call the methods of all callbacks in the order of `mmldlm.trainer.callbacks`, so a method may be
    collective. Steps are counted from 1. Checkpoints do not contain the attributes of a callback: store such state in
    `TrainState`.
    """

    def before_step(self, step: int) -> None:
        """Prepare for a step. Called before the first micro-batch of the step is used."""

    def before_update(self, step: int) -> None:
        """Read the gradients of a step, which `Engine.gradients` yields. Called before they are clipped."""

    def after_step(self, step: int) -> None:
        """Act on a finished step. Called after its update and its record, and before the checkpoint of this step."""

    def close(self) -> None:
        """Release files and the like at the end of the run, also after an error (not collective)."""
