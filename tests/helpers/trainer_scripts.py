"""End of the scripts that run `mmldlm.train` with a subclass of `Trainer`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from mmldlm import train
from mmldlm.trainer.trainer import Trainer


def train_and_exit(trainer_cls: type[Trainer] = Trainer) -> NoReturn:
    """Run the command line with `trainer_cls` and exit as `python -m mmldlm.train` does."""
    leave(train.main(trainer_cls=trainer_cls))


def leave(status: int) -> NoReturn:
    """Exit at once, without destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
