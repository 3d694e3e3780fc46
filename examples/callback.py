"""Train as `mmldlm train` does, and log the gradient norm of each part of the network every 10 steps.

    python examples/callback.py CONFIG.yaml [key.sub=value ...]

The curves are called `grad_norm/text_stream`, `grad_norm/text_head` and so on. Launchers start this file in place of
`-m mmldlm.train`.
"""

from __future__ import annotations

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.model.parts import part_of
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.callback import Callback

EVERY = 10  # steps


class GradientNorms(Callback):
    """Gradient norms before clipping, by part of the network."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def before_update(self, step: int) -> None:
        """Log the norms if they are due. All ranks gather the gradients, and rank 0 writes the norms."""
        if step % EVERY:
            return
        squares: dict[str, float] = {}
        for name, gradient in self.trainer.engine.gradients():
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + float(gradient.norm()) ** 2
        self.trainer.tracker.scalars(step, {f"grad_norm/{part}": square**0.5 for part, square in squares.items()})


class LoggingTrainer(Trainer):
    """A trainer with this callback."""

    def __enter__(self) -> LoggingTrainer:
        super().__enter__()
        self.add_callback(GradientNorms(self))
        return self


if __name__ == "__main__":
    exit_process(train.main(trainer_cls=LoggingTrainer))
