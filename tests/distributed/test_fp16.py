"""`precision: fp16`: the loss scale, and the steps skipped because gradients overflow."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from mmldlm import train
from mmldlm.config import load_config
from mmldlm.distributed import grad_scaler as loss_scale
from mmldlm.distributed.grad_scaler import INITIAL_SCALE, MAX_SCALE, MIN_SCALE, LossScale
from mmldlm.trainer.step_guard import Skip
from mmldlm.trainer.trainer import Trainer
from tests.helpers.engine_runs import records, saved_tensors
from tests.helpers.faulty_steps import run_with_faults, skipped_steps
from tests.helpers.forked_runs import ForkedRuns


def test_gradients_scale_with_the_loss(tiny_config: Path) -> None:
    """Unscaled gradients would underflow in float16; the optimizer gets unscaled ones."""
    result: dict[str, list[list[torch.Tensor]]] = {}
    norms: dict[str, float] = {}
    for precision in ("fp32", "fp16"):
        # A weight at which the scaled gradients of so small a model do not overflow.
        settings = ["data.num_workers=0", f"precision={precision}", f"run.dir={tiny_config.parent / precision}"]
        settings.append("loss.latent_weight=0.01")
        with Trainer(load_config(tiny_config, settings)) as run:
            assert run.engine.accelerator.scaler is None, "Accelerate would scale once more"
            step, micro_batches = next(run.steps())
            (noised,) = run.corrupt(step, micro_batches)
            run.compute(noised, run.sync(step, [noised]).denominators)
            kept = result[precision] = []
            parameters = list(run.engine.model.parameters())
            kept.append([p.grad.clone() for p in parameters if p.grad is not None])
            run.engine.optimizer.zero_grad = lambda **_: None  # type: ignore[method-assign]
            run.engine.complete_gradients()
            norms[precision] = float(run.engine.update(0.0, 0.0))
            kept.append([p.grad.clone() for p in parameters if p.grad is not None])
    pairs = zip(result["fp32"], result["fp16"], strict=True)
    for (exact, scaled), factor in zip(pairs, (INITIAL_SCALE, 1.0), strict=True):
        for ours, theirs in zip(scaled, exact, strict=True):
            assert (ours / factor - theirs).norm() <= 0.02 * theirs.norm()
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=5e-3)


@pytest.mark.parametrize("engine", ["single", pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_an_overflow_on_one_rank_halves_the_scale_of_all(
    engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Three and a loss that is not finite in a row, where two faults in a row would end the run."""
    faults = [{"step": step, "kind": "bad_gradient", "rank": 1, "micro_batch": 0} for step in (1, 2, 3)]
    faults.append({"step": 4, "kind": "loss", "rank": 0, "micro_batch": 1})
    settings = ("train.steps=9", "guard.max_consecutive=2")
    folder = tmp_path / "run"
    result = run_with_faults(
        forked, engine, folder, faults, parity_config, *settings, "precision=fp16", "validation.every=0"
    )
    for rank in result:
        changed = [after != before for before, after in zip(rank["digests"], rank["digests"][1:], strict=False)]
        assert [step for step, new in enumerate(changed) if not new] == [1, 2, 3, 4]
    skips = records(folder, "skip")
    assert {step: skip["reason"] for step, skip in skips.items()} == {
        2: "overflow",
        3: "overflow",
        4: "overflow",
        5: "loss",
    }
    halved = [INITIAL_SCALE, INITIAL_SCALE / 2, INITIAL_SCALE / 4]
    assert [skips[step]["optim/loss_scale"] for step in (2, 3, 4)] == halved
    assert [line.get("loss_scale") for line in skipped_steps(folder).values()] == [*halved, None]
    curve = records(folder)
    scales = {1: INITIAL_SCALE, **dict.fromkeys((6, 7, 8, 9), INITIAL_SCALE / 16)}
    assert {step: record["optim/loss_scale"] for step, record in curve.items()} == scales
    assert curve[9]["health/skipped_steps"] == 4


def test_loss_scale_is_resumed(parity_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL_SCALE", 2.0**24)  # which overflows
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    settings = ["precision=fp16", "checkpoint.every_steps=8", "validation.every=0", "guard.max_consecutive=1"]
    for name in ("whole", "again"):
        if name == "again":
            kept = Path("checkpoints", "step-00000008")
            shutil.copytree(tmp_path / "whole" / kept, tmp_path / name / kept)
        assert train.main([str(parity_config), f"run.dir={tmp_path / name}", *settings]) == 0
    whole, again = records(tmp_path / "whole"), records(tmp_path / "again")
    skips = records(tmp_path / "whole", "skip")
    assert 1 in skips and {skip["reason"] for skip in skips.values()} == {"overflow"}
    scales = {step: record["optim/loss_scale"] for step, record in whole.items()}
    assert min(scales.values()) < 2.0**24 and len(set(scales.values())) > 1
    assert {step: scales[step] for step in again} == {step: again[step]["optim/loss_scale"] for step in again}
    for name in ("model", "optimizer"):
        expected = saved_tensors(tmp_path / "whole", name)
        assert all(
            torch.equal(tensor, expected[key]) for key, tensor in saved_tensors(tmp_path / "again", name).items()
        )
    ends = [tmp_path / name / "checkpoints/step-00000020/state.json" for name in ("whole", "again")]
    first, second = (json.loads(path.read_text()) for path in ends)
    assert first == second and first["loss_scale"] is not None and first["skipped_in_a_row"] == 0


@pytest.mark.quick
def test_loss_scale_follows_gradscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 4)
    ours, theirs = LossScale(torch.device("cpu")), torch.amp.GradScaler("cpu", growth_interval=4)
    seen = set()
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    generator = torch.Generator().manual_seed(3)
    for step in range(200):
        if step == 100:  # through a checkpoint
            scale, good = ours.get_state()
            ours = LossScale(torch.device("cpu"))
            ours.restore(scale, good)
        theirs.scale(parameter.sum()).backward()
        assert parameter.grad is not None
        if torch.rand((), generator=generator) < 0.15:
            parameter.grad[1] = math.inf if step % 2 else math.nan
        kept = parameter.grad.clone()
        theirs.unscale_(optimizer)
        unscaled, parameter.grad = parameter.grad, kept
        ours.unscale([parameter, torch.nn.Parameter(torch.ones(1))], 3)
        assert torch.equal(parameter.grad.nan_to_num(7), (3 * unscaled).nan_to_num(7))
        before = float(ours.scale)
        ours.update(parameter.grad.norm())
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert float(ours.scale) == theirs.get_scale() and float(ours.last_scale) == before
        seen.add(float(ours.scale))
    assert len(seen) > 5 and min(seen) > MIN_SCALE and max(seen) < MAX_SCALE
    for _ in range(40):
        ours.update(torch.tensor(math.nan))
    assert ours.get_state() == (MIN_SCALE, 0)


@pytest.mark.quick
def test_overflow_at_the_smallest_scale_is_an_error() -> None:
    records = [[{"samples": [1], "loss": 2.0}]]
    assert Skip.classify(1, math.inf, records, 2.0).reason == "overflow"
    assert Skip.classify(1, math.inf, records, MIN_SCALE).reason == "norm"
    assert Skip.classify(1, 9.0, records, 2.0).reason == "spike"
    assert Skip.classify(1, math.nan, [[{"samples": [1], "loss": math.nan}]], 2.0).reason == "loss"
