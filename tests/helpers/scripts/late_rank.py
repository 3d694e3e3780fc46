"""`mmldlm.train` in which rank 1 enters a step's exchange only after rank 0 has finished the step's first forward pass.

Not in the first two steps: DDP rebuilds its buckets in a forward pass, on all ranks together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.step_numbers import StepTotals
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit
from tests.helpers.waiting import wait_until

FOLDER = Path(os.environ["LATE_RANK_FOLDER"])


class LateTrainer(Trainer):
    def sync(self, step: int, noised: Sequence[NoisedBatch]) -> StepTotals:
        finished = FOLDER / f"forward-{step}"
        if self.engine.is_main:
            self.engine.unwrapped_model.register_forward_hook(lambda *_: finished.touch())
        elif step > 1:
            wait_until(finished.exists, f"forward pass of rank 0 in step {step}")
        return super().sync(step, noised)


train_and_exit(LateTrainer)
