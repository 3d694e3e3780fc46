"""`mmldlm.train` with `precision: fp16` and a loss scale that is too large: at the start, as any may be, and again and
again from step GROWS_FROM on, when it doubles after every step that did not overflow.
"""

from __future__ import annotations

import os
import sys

from torch import Tensor

from mmldlm import train
from mmldlm.distributed import grad_scaler as loss_scale
from mmldlm.distributed.grad_scaler import LossScale

STEP = int(os.environ["GROWS_FROM"])
_follow = LossScale.update
seen = 0


def follow(self: LossScale, norm: Tensor) -> None:
    global seen
    seen += 1
    if seen > STEP:
        loss_scale.GROWTH_INTERVAL = 1
    _follow(self, norm)


loss_scale.INITIAL_SCALE = 2.0**20
LossScale.update = follow  # type: ignore[method-assign]
status = train.main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
