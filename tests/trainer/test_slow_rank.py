"""A rank that computes more slowly than the others is named: on the console, in the records, by monitor and report."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mmldlm.tools.compare.run_summary import RunSummary
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
    history, name = History(run), f"rank 2 on {socket.gethostname()}"
    named, *later = history.by_kind("slow_rank")
    assert (named["rank"], named["slow"]) == (2, True) and named["step"] <= 45 and named["slowdown"] > 0.1
    assert {(record["rank"], record["slow"]) for record in later} <= {(2, False)}
    assert f"slow_rank at step {named['step']}: {name} is {named['slowdown']:.0%} slower" in (
        run.with_suffix(".log").read_text()
    )
    for record in history.by_kind("train"):
        assert 0 < record["speed/compute_s"] <= record["speed/compute_s_slowest"]
    found = {alert.name: alert.found for alert in alerts(seen_at(run, named["step"]))}
    assert f"{name} ({named['slowdown']:.0%}, since step {named['step']})" in found["slow rank"]
    assert ("slow_rank", named["step"]) in RunSummary(run).events
    if later:
        assert "slow rank" not in {alert.name for alert in alerts(seen_at(run, later[-1]["step"]))}
