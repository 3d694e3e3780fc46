"""End of the scripts that run `mmldlm.train` with a subclass of `Trainer`."""

from __future__ import annotations

from typing import NoReturn

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.trainer.trainer import Trainer


def train_and_exit(trainer_cls: type[Trainer] = Trainer) -> NoReturn:
    """Run the command line with `trainer_cls` and exit as `python -m mmldlm.train` does."""
    exit_process(train.main(trainer_cls=trainer_cls))
