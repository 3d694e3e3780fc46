"""The step's exchange of counts and requests runs beside the first forward pass."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.engine_runs import CURVE, Single, difference
from tests.helpers.forked_runs import ForkedRuns


def test_forward_does_not_wait_for_the_other_ranks(
    parity_config: Path, single: Single, forked: ForkedRuns, tmp_path: Path
) -> None:
    """Rank 1 enters the exchange after rank 0's forward pass: a rank that waited before would wait forever."""
    settings, folder = ["train.steps=4", "validation.every=0"], tmp_path / "run"
    variables = {"script": "late_rank.py", "LATE_RANK_FOLDER": str(tmp_path)}
    forked.succeed("ddp", folder, 2, parity_config, *settings, "distributed.timeout_s=60", **variables)
    assert len(list(tmp_path.glob("forward-*"))) == 4
    assert difference(folder, single(*settings), CURVE) < 1e-5
