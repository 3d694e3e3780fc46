"""A rank that computes more slowly than the others is named: in the records and by the monitor."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mmldlm.tools.monitor.alerts import alerts
from mmldlm.tools.runs import History
from tests.helpers.engine_runs import some
from tests.helpers.forked_runs import ForkedRuns
from tests.helpers.monitor_runs import seen_at

SETTINGS = ("train.steps=65", "log.every=5", "validation.every=0", "checkpoint.every_steps=0")


@pytest.mark.parametrize("engine", some("ddp"))
def test_slow_rank_is_named(engine: str, parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    """Far slower than the threshold, since other tests may use the machine at the same time."""
    run, variables = tmp_path / "run", {"SLOW_RANK": "2", "SLOW_SHARE": "0.5", "LAST_SLOW": "45"}
    forked.succeed(engine, run, 4, parity_config, *SETTINGS, script="slow_rank.py", **variables)
    curve = {record["step"]: record for record in History(run).by_kind("train")}
    for step, record in curve.items():
        assert 0 < record["speed/compute_s"] <= record["speed/compute_s_slowest"]
        if 5 < step <= 45:
            assert record["speed/slowest_rank"] == 2
            assert record["speed/compute_s_slowest"] > 1.1 * record["speed/compute_s"]
    named = {alert.name: alert.found for alert in alerts(seen_at(run, 45))}
    assert f"rank 2 on {socket.gethostname()} is " in named["slow rank"]
    assert "slow rank" not in {alert.name for alert in alerts(seen_at(run, 65))}
