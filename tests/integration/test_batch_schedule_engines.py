"""`train.batch_schedule` under every engine: one curve over all stages, and bitwise equal resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.engine_runs import CURVE, difference, records, some
from tests.helpers.forked_runs import ForkedRuns

SIZES = "global_batch_size: {}, micro_batch_size: {}"
STAGES = {0: (8, 4), 2: (24, 2), 4: (48, 24), 5: (48, 12)}  # 1, 6, 1 and 2 micro-batches on each of two ranks
SCHEDULE = "train.batch_schedule={" + ", ".join(f"{s}: {{{SIZES.format(*n)}}}" for s, n in STAGES.items()) + "}"
SETTINGS = (SCHEDULE, "train.steps=7", "validation.every=0", "checkpoint.every_steps=0")


@pytest.mark.parametrize("engine", some("zero3"))
def test_two_processes_follow_one(
    engine: str, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    forked.succeed(engine, tmp_path / "run", 2, parity_config, *SETTINGS)
    assert difference(tmp_path / "run", single(*SETTINGS)) < 1e-5
    sizes = [record["data/global_batch_size"] for record in records(tmp_path / "run").values()]
    assert sizes == [8] * 2 + [24] * 2 + [48] * 3


@pytest.mark.parametrize("engine", [pytest.param("ddp", marks=pytest.mark.slow), "zero2"])
def test_resumed_run_is_bitwise_equal(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Resumed in the midst of the second stage and on the edge of the last."""
    given = (*SETTINGS, "checkpoint.keep_steps=[3, 5]")
    forked.succeed(engine, tmp_path / "whole", 2, parity_config, *given)
    whole = records(tmp_path / "whole")
    for step in (3, 5):
        folder, kept = tmp_path / str(step), Path("checkpoints", f"step-{step:08}")
        shutil.copytree(tmp_path / "whole" / kept, folder / kept)
        forked.succeed(engine, folder, 2, parity_config, *given)
        ours = records(folder)
        assert list(ours) == list(range(step + 1, 8))
        keys = (*CURVE, "data/epoch", "data/tokens")
        assert all(ours[each][key] == whole[each][key] for each in ours for key in keys)
