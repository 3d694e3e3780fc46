"""`train.micro_batch_tokens` under every engine: the curve of micro-batches by samples, and bitwise equal resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.engine_runs import CURVE, difference, records, some
from tests.helpers.forked_runs import ForkedRuns

# As many samples as three ranks can share; from step 3 on larger batches and one micro-batch a rank.
SETTINGS = (
    "train.steps=5",
    "train.global_batch_size=24",
    "train.micro_batch_size=null",
    "validation.every=0",
    "checkpoint.every_steps=0",
)
BUDGET = ("train.micro_batch_tokens=60", "train.batch_schedule={3: {global_batch_size: 48, micro_batch_tokens: 5000}}")
BY_SAMPLES = ("train.micro_batch_size=4", "train.batch_schedule={3: {global_batch_size: 48}}")


@pytest.mark.parametrize(
    ("engine", "processes"),
    [
        *(
            pytest.param(*each.values, 2, id=f"{each.values[0]}-2", marks=each.marks)
            for each in some("ddp", "fsdp2", "zero2")
        ),
        pytest.param("ddp", 3, id="ddp-3"),
        pytest.param("fsdp2", 4, id="fsdp2-4", marks=pytest.mark.slow),
    ],
)
def test_a_budget_changes_no_curve(
    engine: str, processes: int, parity_config: Path, single: Callable[..., Path], forked: ForkedRuns, tmp_path: Path
) -> None:
    forked.succeed(engine, tmp_path / "run", processes, parity_config, *SETTINGS, *BUDGET)
    assert difference(tmp_path / "run", single(*SETTINGS, *BY_SAMPLES)) < 1e-5
    ours = records(tmp_path / "run").values()
    assert [record["data/micro_batch_tokens"] for record in ours] == [60] * 3 + [5000] * 2
    assert "micro-batches of up to 60 tokens" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("zero2", marks=pytest.mark.slow)])
def test_resumed_run_is_bitwise_equal(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    given = (*SETTINGS, *BUDGET, "checkpoint.keep_steps=[2]")
    forked.succeed(engine, tmp_path / "whole", 2, parity_config, *given)
    folder, kept = tmp_path / "resumed", Path("checkpoints", "step-00000002")
    shutil.copytree(tmp_path / "whole" / kept, folder / kept)
    forked.succeed(engine, folder, 2, parity_config, *given)
    ours, whole = records(folder), records(tmp_path / "whole")
    assert list(ours) == [3, 4, 5]
    assert all(ours[step][key] == whole[step][key] for step in ours for key in (*CURVE, "data/tokens"))
