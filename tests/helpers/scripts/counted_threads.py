"""`mmldlm.train` that writes to FACTS/threads, after each step, how many threads of the process are not Python's."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from mmldlm.trainer.trainer import Trainer
from tests.helpers.trainer_scripts import train_and_exit

FACTS = Path(os.environ["FACTS"], "threads")


class CountedThreads(Trainer):
    def end_step(self, step: int, *rest: Any) -> None:
        super().end_step(step, *rest)
        # At the end of the checkpoint in progress: its thread has computed what it computes.
        self.checkpointer.record(self.checkpointer.finish(), self.tracker)
        native = len(list(Path("/proc/self/task").iterdir())) - threading.active_count()
        with FACTS.open("a") as file:
            file.write(f"{native}\n")


train_and_exit(CountedThreads)
