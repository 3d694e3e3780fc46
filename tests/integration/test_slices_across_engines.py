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
REST = (("single", 1), ("ddp", 2), ("zero1", 2), ("zero3_offload", 2), ("fsdp2_hsdp", 4))
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


@pytest.mark.parametrize(
    ("engine", "processes"),
    [("fsdp2", 2), ("zero3", 2), ("zero2", 2), *(pytest.param(e, n, marks=pytest.mark.slow) for e, n in REST)],
)
def test_a_rank_has_what_it_writes(
    engine: str, processes: int, tiny_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """It starts from its part of the initial weights, frozen ones too, in the same bits under every engine.

    At the end the state is drawn without a collective, and every element is written by exactly one rank.
    """
    settings = (*SETTINGS, "train.steps=1", "freeze=[text_encoder]", "precision=bf16", "train.micro_batch_size=1")
    forked.succeed(engine, tmp_path / "run", processes, tiny_config, *settings, script="local_state.py")
