"""`mmldlm.train` where a weight becomes NaN by itself after step RUINED_AFTER, as by a fault of the memory."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch

from mmldlm import train
from mmldlm.trainer.trainer import Trainer

STEP = int(os.environ["RUINED_AFTER"])
_finish_step = Trainer.finish_step


def finish_step(self: Trainer, *arguments: Any) -> None:
    if self.state.step + 1 == STEP:
        with torch.no_grad():
            self.runtime.unwrapped_model.text_out.weight[0, 0] = math.nan
    _finish_step(self, *arguments)


Trainer.finish_step = finish_step  # type: ignore[method-assign]
status = train.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
