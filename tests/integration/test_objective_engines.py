"""Learned loss weights, training-only loss terms and learning-rate rules under several engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.engine_runs import CURVE, difference, records, saved_tensors
from tests.helpers.forked_runs import ForkedRuns

# A plateau that takes nothing for progress: the rate is cut at steps that follow from the training loss of all ranks.
SETTINGS = (
    "loss.latent_weighting=uncertainty",
    "loss.label_smoothing=0.1",
    "loss.z_loss=1e-3",
    "loss.text_weight_limit=4",
    "loss.latent_time_weighting=min_snr",
    "text.time_sampling=mode",
    "latent.time_sampling=mode",
    "latent.stratified=false",
    "schedule.lr=plateau",
    "schedule.patience=2",
    "schedule.threshold=0.02",
    "schedule.factor=0.8",
    "optim.lr_scaling=sqrt",
    "optim.lr_reference_batch=4",
    "train.batch_schedule={6: {global_batch_size: 16}}",
    "train.steps=12",
    "validation.every=0",
    "checkpoint.every_steps=0",
    "checkpoint.keep_steps=[5]",
)
SHOWN = (*CURVE, "loss/text", "loss/latent", "loss/z", "loss/label_smoothing", "loss/text_weight", "loss/latent_weight")
WEIGHTS = "loss_weights.value"


@pytest.mark.parametrize(
    "engine", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero2", "zero3"))]
)
def test_two_processes_follow_one_and_resume_with_the_same_bits(
    engine: str, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    reference, folder, resumed = single(*SETTINGS), tmp_path / "run", tmp_path / "resumed"
    forked.succeed(engine, folder, 2, parity_config, *SETTINGS)
    curve = records(folder)
    assert difference(folder, reference, SHOWN) < 1e-5
    for name in ("model", "optimizer"):
        ours, theirs = saved_tensors(folder, name), saved_tensors(reference, name)
        assert ours.keys() == theirs.keys() and any(key.startswith(WEIGHTS) for key in ours)
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours if ours[key].numel()) < 1e-5
    assert curve[12]["loss/latent_weight"] != curve[1]["loss/latent_weight"]
    # Scaled by the root of the batch, and cut at least once.
    rates = {round(record["optim/lr"] / 1e-3 / (2 if step > 6 else 2**0.5), 9) for step, record in curve.items()}
    assert {1.0, 0.8} <= rates

    # Weights, their moments and what the plateau remembers are all in the checkpoint.
    kept = Path("checkpoints", "step-00000005")
    shutil.copytree(folder / kept, resumed / kept)
    forked.succeed(engine, resumed, 2, parity_config, *SETTINGS)
    again = records(resumed)
    assert list(again) == list(range(6, 13))
    assert all(again[step][key] == curve[step][key] for step in again for key in SHOWN)
    for name in ("model", "optimizer"):
        expected = saved_tensors(folder, name)
        assert all(torch.equal(tensor, expected[entry]) for entry, tensor in saved_tensors(resumed, name).items())
