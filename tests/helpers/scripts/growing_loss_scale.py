"""`mmldlm.train` with `precision: fp16` and a loss scale that is too large: at the start, as any may be, and again and
again from step GROWS_FROM on, when it doubles after every step that did not overflow.
"""

from __future__ import annotations

import os

from mmldlm.distributed import grad_scaler
from mmldlm.trainer.step import StepResult
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

STEP = int(os.environ["GROWS_FROM"])


class GrowingTrainer(Trainer):
    def update(self, step: int) -> StepResult:
        if step == STEP:
            grad_scaler.GROWTH_INTERVAL = 1
        return super().update(step)


grad_scaler.INITIAL_SCALE = 2.0**20
train_and_exit(GrowingTrainer)
