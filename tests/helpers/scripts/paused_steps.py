"""`mmldlm.train` with a pause of STEP_S seconds after each step."""

from __future__ import annotations

import os
import time
from typing import Any

from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

STEP_S = float(os.environ["STEP_S"])


class PausedTrainer(Trainer):
    def end_step(self, *arguments: Any) -> None:
        time.sleep(STEP_S)
        super().end_step(*arguments)


train_and_exit(PausedTrainer)
