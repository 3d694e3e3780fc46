"""`mmldlm.train` on a disk that becomes slow: from step SLOW_STEP on, reading takes four times as long as a step."""

from __future__ import annotations

import os
import statistics
import time
from itertools import pairwise
from typing import Any

from mmldlm.data import loader
from tests.helpers.trainer_scripts import train_and_exit

STEP = int(os.environ["SLOW_STEP"])
_collate = loader.collate
began: list[float] = []  # at which a micro-batch was read, one a step


def collate(*arguments: Any, **options: Any) -> Any:
    began.append(time.monotonic())
    if len(began) > STEP:
        time.sleep(4 * statistics.median(later - earlier for earlier, later in pairwise(began[:STEP])))
    return _collate(*arguments, **options)


loader.collate = collate
train_and_exit()
