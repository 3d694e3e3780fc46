"""`mmldlm.train`, in which one rank goes wrong: FAULT=raise | nan | hang, at step FAULT_STEP on FAULT_RANK."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from mmldlm import train
from mmldlm.distributed.engine import Engine
from mmldlm.trainer.trainer import Trainer

FAULT, STEP, RANK = os.environ["FAULT"], int(os.environ["FAULT_STEP"]), int(os.environ.get("FAULT_RANK", "1"))
_corrupt, _backward = Trainer.corrupt, Engine.backward


def corrupt(self: Trainer, step: int, micro_batches: list[Any]) -> Any:
    if step == STEP and self.runtime.rank == RANK:
        if FAULT == "raise":
            raise ValueError("planted in the data of this rank")
        if FAULT == "hang":
            while True:
                time.sleep(0.1)
    found = _corrupt(self, step, micro_batches)
    if FAULT == "nan" and step == STEP and self.runtime.rank == RANK:
        found[0][0].noised_latents.fill_(torch.nan)
    return found


Trainer.corrupt = corrupt  # type: ignore[method-assign]
status = train.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
