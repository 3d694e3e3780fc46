"""What one engine saves, every other loads and saves again with the same bits, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.changed_checkpoints import manifest_body
from tests.helpers.engine_runs import saved_tensors
from tests.helpers.forked_runs import ForkedRuns

# With three ranks no tensor of the network divides evenly, and some ranks have none of the small ones.
CHAIN = [
    ("ddp", 2),
    ("fsdp2", 3),
    ("zero1", 3),
    ("fsdp2_hsdp", 4),
    ("fsdp2", 2),
    ("zero3", 3),
    ("zero2", 2),
    ("zero3_hpz", 4),
    ("zero3", 2),
    ("single", 1),
]
SETTINGS = ("train.global_batch_size=12", "train.steps=2", "validation.every=0", "ema.decay=0.9", "data.num_workers=0")
REST = (("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero3_offload", 2))
GROUPS = ("model", "optimizer", "ema")
LAST = Path("checkpoints", "step-00000002")


def load_and_save(forked: ForkedRuns, engine: str, processes: int, folder: Path, *arguments: object) -> None:
    """Start a run from a checkpoint at its last step, so that it only loads and saves."""
    variables = {"LOCAL_WORLD_SIZE": "2"} if engine == "zero3_hpz" else {}
    forked.succeed(engine, folder, processes, *arguments, *SETTINGS, **variables)


def assert_same_state(folder: Path, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    for group in GROUPS:
        saved = saved_tensors(folder, group)
        assert saved.keys() == expected[group].keys(), (folder, group)
        assert all(torch.equal(saved[name], expected[group][name]) for name in saved), (folder, group)


@pytest.mark.slow
def test_state_passes_through_every_engine_bit_by_bit(tiny_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    source = tmp_path / "source"
    forked.succeed("single", source, 1, tiny_config, *SETTINGS)
    expected = {group: saved_tensors(source, group) for group in GROUPS}
    for number, (engine, processes) in enumerate(CHAIN):
        folder = tmp_path / f"{number}-{engine}"
        load_and_save(forked, engine, processes, folder, tiny_config, f"resume={source / LAST}")
        assert_same_state(folder, expected)
        # With hybrid sharding the first of two replicas writes all.
        files = {"single": 1, "fsdp2_hsdp": 2}.get(engine, processes)
        assert manifest_body(folder / LAST)["tensors"]["model"]["files"] == files
        source = folder


@pytest.mark.parametrize(
    ("engine", "processes"),
    [("fsdp2_hsdp", 4), ("zero3", 2), ("zero2", 2), *(pytest.param(e, n, marks=pytest.mark.slow) for e, n in REST)],
)
def test_a_rank_has_what_it_writes(
    engine: str, processes: int, tiny_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    """It starts from its part of the initial weights, frozen ones too, in the same bits under every engine.

    At the end the state is drawn without a collective, and every element is written by exactly one rank.
    """
    settings = (*SETTINGS, "train.steps=1", "freeze=[text_encoder]", "precision=bf16", "train.micro_batch_size=1")
    forked.succeed(engine, tmp_path / "run", processes, tiny_config, *settings, script="local_state.py")


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_no_rank_holds_the_whole_model_at_the_start(
    engine: str, tiny_config: Path, forked: ForkedRuns, tmp_path: Path
) -> None:
    settings = (*SETTINGS, "train.steps=1", "model.depth=16", "ema.decay=0", "checkpoint.every_steps=0")
    forked.succeed(engine, tmp_path / "run", 3, tiny_config, *settings, script="start_memory.py")
