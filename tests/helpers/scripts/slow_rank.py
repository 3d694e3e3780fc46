"""`mmldlm.train` in which each step of rank SLOW_RANK takes SLOW_SHARE longer than it needs, up to step LAST_SLOW."""

from __future__ import annotations

import os
import time
from typing import Any

from mmldlm.trainer.step_numbers import StepResult
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

RANK, SHARE, LAST = int(os.environ["SLOW_RANK"]), float(os.environ["SLOW_SHARE"]), int(os.environ["LAST_SLOW"])


class SlowTrainer(Trainer):
    """Burns a share of the rank's CPU time, which does not depend on what else the machine does."""

    def corrupt(self, *arguments: Any) -> Any:
        self.started = time.thread_time()
        return super().corrupt(*arguments)

    def update(self, *arguments: Any) -> StepResult:
        result, now = super().update(*arguments), time.thread_time()
        while (
            self.engine.rank == RANK
            and self.state.step < LAST
            and time.thread_time() < now + SHARE * (now - self.started)
        ):
            pass
        return result


train_and_exit(SlowTrainer)
