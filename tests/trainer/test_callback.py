"""A callback's numbers are where those of the run are, and a run that is computed again has the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from mmldlm import train
from mmldlm.tools.runs import History
from mmldlm.trainer.trainer import Trainer
from mmldlm.utils.callback import Callback

TAG = "optim/embedding_mean"


class EmbeddingMean(Callback):
    """Mean absolute value of the token embedding, every other step."""

    def __init__(self, trainer: Trainer):
        self.model, self.tracker, self.closed = trainer.engine.unwrapped_model, trainer.tracker, False

    def after_step(self, step: int) -> None:
        if step % 2 == 0:
            self.tracker.scalars(step, {TAG: float(self.model.token_embedding.weight.detach().abs().mean())})

    def close(self) -> None:
        self.closed = True


class MeasuredTrainer(Trainer):
    callback: EmbeddingMean

    def __enter__(self) -> MeasuredTrainer:
        super().__enter__()
        MeasuredTrainer.callback = EmbeddingMean(self)
        self.add_callback(self.callback)
        return self


@pytest.mark.quick
def test_numbers_of_a_callback_are_curves_of_the_run(tiny_config: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", ["train.steps=4", "log.tensorboard=true"]
    assert train.main([str(tiny_config), *settings], trainer_cls=MeasuredTrainer) == 0
    assert MeasuredTrainer.callback.closed
    series = History(run).series(TAG)
    assert series.steps == [2, 4] and series.values[0] != series.values[1] and TAG in History(run).tags()
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors(TAG)] == [2, 4]
