"""`mmldlm.train`, in which one rank goes wrong: FAULT=raise | nan | hang, at step FAULT_STEP on FAULT_RANK."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from mmldlm.batch import Batch
from mmldlm.diffusion.objective import NoisedBatch
from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

FAULT, STEP, RANK = os.environ["FAULT"], int(os.environ["FAULT_STEP"]), int(os.environ.get("FAULT_RANK", "1"))


class FaultyTrainer(Trainer):
    def corrupt(self, step: int, micro_batches: Sequence[Batch]) -> list[NoisedBatch]:
        is_faulty = step == STEP and self.engine.rank == RANK
        if is_faulty and FAULT == "raise":
            raise ValueError("planted in the data of this rank")
        while is_faulty and FAULT == "hang":
            time.sleep(0.1)
        noised = super().corrupt(step, micro_batches)
        if is_faulty and FAULT == "nan":
            noised[0].noised_latents.fill_(torch.nan)
        return noised


train_and_exit(FaultyTrainer)
