"""Train on a CPU as with CUDA graphs, which a stand-in records: REPLAYS=file of rank 0 for what it counted."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mmldlm import train
from mmldlm.errors import exit_process
from mmldlm.trainer import graphs, setup
from mmldlm.trainer.trainer import Trainer
from tests.helpers.host_graphs import HostGraphs

trainers: list[Trainer] = []


class ReplayingTrainer(Trainer):
    def __enter__(self) -> ReplayingTrainer:
        trainers.append(self)
        super().__enter__()
        return self


setup.why_no_graphs = lambda *_: ""
host_graphs = HostGraphs(lambda: trainers[0].engine.local_gradients())
graphs.CudaGraphs = lambda: host_graphs  # type: ignore[assignment, misc]
status = train.main(trainer_cls=ReplayingTrainer)
if os.environ.get("RANK", "0") == "0":
    Path(os.environ["REPLAYS"]).write_text(json.dumps(host_graphs.counts))
exit_process(status)
