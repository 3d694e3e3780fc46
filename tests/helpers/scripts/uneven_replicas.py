"""`mmldlm.train` whose second replica has larger gradients in step 2: FACTS=folder of each rank's gradient norms."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mmldlm import train
from mmldlm.distributed.grad_scaler import to_local
from mmldlm.errors import exit_process
from mmldlm.trainer.step_numbers import StepResult
from mmldlm.trainer.trainer import Trainer

norms: list[float] = []


class UnevenTrainer(Trainer):
    def update(self, *arguments: Any) -> StepResult:
        if len(norms) == 1 and self.engine.rank >= 2:
            for parameter in self.engine.unwrapped_model.parameters():
                if parameter.grad is not None:
                    to_local(parameter.grad).mul_(1.5)
        result = super().update(*arguments)
        norms.append(float(result.grad_norm))
        return result


status = train.main(trainer_cls=UnevenTrainer)
(Path(os.environ["FACTS"]) / f"norms.rank{os.environ['RANK']}.json").write_text(json.dumps(norms))
exit_process(status)
