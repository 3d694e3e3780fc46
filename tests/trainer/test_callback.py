"""A callback sees the gradients of a step and logs to the records of the run: `examples/callback.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from mmldlm import train
from mmldlm.model.parts import part_of
from mmldlm.tools.runs import History
from mmldlm.trainer.step_numbers import StepResult
from mmldlm.utils.callback import Callback
from tests.helpers.engine_runs import records, some
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.paths import ROOT

EXAMPLE = ROOT / "examples" / "callback.py"
spec = importlib.util.spec_from_file_location("example", EXAMPLE)
assert spec is not None and spec.loader is not None
example: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

TAG = "grad_norm/text_stream"
SETTINGS = ("validation.every=0", "checkpoint.every_steps=0")


class Closed(Callback):
    """Counts how often it is closed."""

    count = 0

    def close(self) -> None:
        Closed.count += 1


class CheckedTrainer(example.LoggingTrainer):
    """Computes the norms of the tenth step with autograd, from the losses of its micro-batches."""

    expected: dict[str, float]

    def __enter__(self) -> CheckedTrainer:
        super().__enter__()
        self.add_callback(Closed())
        return self

    def sync(self, step: int, noised: Sequence[Any]) -> Any:
        self.noised, self.totals = noised, super().sync(step, noised)
        return self.totals

    def update(self, step: int) -> StepResult:
        if self.state.step == 9:
            network, squares = self.engine.unwrapped_model, dict[str, float]()
            losses = [self.components.objective(network, batch, self.totals.denominators)[0] for batch in self.noised]
            names, weights = zip(*network.named_parameters(), strict=True)
            gradients = torch.autograd.grad(torch.stack(losses).sum(), weights)
            for name, gradient in zip(names, gradients, strict=True):
                squares[part_of(name)] = squares.get(part_of(name), 0.0) + float(gradient.double().square().sum())
            CheckedTrainer.expected = {f"grad_norm/{part}": square**0.5 for part, square in squares.items()}
        return super().update(step)


def norms(run: Path) -> dict[int, dict[str, float]]:
    """The norms of each part, by step."""
    return {
        step: {key: value for key, value in record.items() if key.startswith("grad_norm/")}
        for step, record in records(run, "scalars").items()
    }


def test_norms_are_those_of_autograd_and_curves_of_the_run(tiny_config: Path, tmp_path: Path) -> None:
    run, settings = tmp_path / "run", ["train.steps=20", "train.micro_batch_size=2", "log.tensorboard=true", *SETTINGS]
    assert train.main([str(tiny_config), *settings], trainer_cls=CheckedTrainer) == 0
    assert Closed.count == 1
    logged = norms(run)
    assert [*logged] == [10, 20] and logged[10] == pytest.approx(CheckedTrainer.expected, rel=1e-4)
    total = records(run)[10]["optim/grad_norm"]
    assert sum(norm**2 for norm in logged[10].values()) ** 0.5 == pytest.approx(total, rel=1e-5)
    assert History(run).series(TAG).steps == [10, 20] and TAG in History(run).tags()
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors(TAG)] == [10, 20]


@pytest.fixture(scope="module")
def alone(parity_config: Path, forked: ForkedRuns, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The norms of one process."""
    folder = tmp_path_factory.mktemp("callback") / "single"
    forked.succeed("single", folder, 1, parity_config, "train.steps=10", *SETTINGS, script=str(EXAMPLE))
    return norms(folder)


@pytest.mark.parametrize("engine", some("ddp", "fsdp2", "zero2"))
def test_every_engine_has_the_norms_of_one_process(
    engine: str, alone: dict[int, Any], parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    forked.succeed(engine, tmp_path / engine, 2, parity_config, "train.steps=10", *SETTINGS, script=str(EXAMPLE))
    shared = norms(tmp_path / engine)
    assert shared.keys() == alone.keys() == {10} and shared[10] == pytest.approx(alone[10], rel=1e-3)
