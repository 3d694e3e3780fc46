"""Every engine with any number of processes resumes from the checkpoints of every other."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.engine_runs import CURVE, records
from tests.helpers.forked_runs import ForkedRuns

PROCESSES = {"single": 1, "ddp": 2, "fsdp2": 3, "zero2": 2, "zero3": 2, "fsdp2_hsdp": 4}
SETTINGS = ("train.global_batch_size=12", "train.steps=14", "validation.every=0")


@pytest.mark.slow
@pytest.mark.parametrize("source", PROCESSES)
def test_every_engine_resumes_from(
    source: str, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    """The 4 steps that follow, in which the modes change, are those of one process that was never stopped."""
    reference = records(single(*SETTINGS))

    def go(engine: str, folder: Path, *settings: str) -> None:
        # 12 samples are 3 on each of 4 processes.
        sizes = ["train.micro_batch_size=1"] if PROCESSES[engine] == 4 else []
        forked.succeed(engine, folder, PROCESSES[engine], parity_config, *SETTINGS, *sizes, *settings)

    go(source, tmp_path / "source", "checkpoint.every_steps=0", "checkpoint.keep_steps=[10]")
    saved = Path("checkpoints", "step-00000010")
    for target in PROCESSES:
        folder = tmp_path / target
        shutil.copytree(tmp_path / "source" / saved, folder / saved)
        go(target, folder, "checkpoint.every_steps=0")
        ours = records(folder)
        assert list(ours) == list(range(11, 15)), target
        worst = {s: max(abs(ours[s][key] / reference[s][key] - 1) for key in CURVE) for s in ours}
        assert abs(ours[11]["loss/total"] / reference[11]["loss/total"] - 1) < 1e-5, target
        assert max(worst.values()) < 1e-4, (target, worst)
