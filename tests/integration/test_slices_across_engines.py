"""What one engine saves, every other loads and saves again with the same bits, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmldlm.checkpoint.manifest import verify_checkpoint
from mmldlm.checkpoint.tensors import TensorFiles
from tests.helpers.engine_runs import saved_tensors
from tests.helpers.forked_runs import ForkedRuns

# With three ranks no tensor of the network divides evenly, and some ranks have none of the small ones.
CHAIN = [("ddp", 2), ("fsdp2", 3), ("zero1", 3), ("fsdp2", 2), ("zero3", 3), ("zero2", 2), ("zero3", 2), ("single", 1)]
SETTINGS = ("train.global_batch_size=12", "train.steps=2", "validation.every=0", "ema.decay=0.9", "data.num_workers=0")
GROUPS = ("model", "optimizer", "ema")


def test_state_passes_through_every_engine_bit_by_bit(tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Each run starts from the checkpoint of the one before at its last step, so it only loads and saves."""
    source = tmp_path / "source"
    forked.succeed("single", source, 1, tiny_config, *SETTINGS)
    expected = {group: saved_tensors(source, group) for group in GROUPS}
    for number, (engine, processes) in enumerate(CHAIN):
        folder = tmp_path / f"{number}-{engine}"
        resume = f"resume={source / 'checkpoints' / 'step-00000002'}"
        forked.succeed(engine, folder, processes, tiny_config, *SETTINGS, resume)
        for group in GROUPS:
            saved = saved_tensors(folder, group)
            assert saved.keys() == expected[group].keys(), (engine, group)
            assert all(torch.equal(saved[name], expected[group][name]) for name in saved), (engine, group)
            TensorFiles.open(verify_checkpoint(folder / "checkpoints" / "step-00000002"), group).check()
        source = folder


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_a_rank_has_what_it_writes(engine: str, tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """The state is drawn without a collective, and every element is written by exactly one rank."""
    forked.succeed(engine, tmp_path / "run", 2, tiny_config, *SETTINGS, "train.steps=1", script="local_state.py")
