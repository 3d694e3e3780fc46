"""`mmldlm.train` in which a weight becomes NaN after step RUINED_AFTER, as by a memory fault."""

from __future__ import annotations

import math
import os

import torch

from mmldlm.trainer.step_log import StepResult, StepTotals
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

STEP = int(os.environ["RUINED_AFTER"])


class RuinedTrainer(Trainer):
    def end_step(self, step: int, totals: StepTotals, result: StepResult) -> None:
        if step + 1 == STEP:
            with torch.no_grad():
                self.engine.unwrapped_model.text_out.weight[0, 0] = math.nan
        super().end_step(step, totals, result)


train_and_exit(RuinedTrainer)
