"""`Engine.gather`: the same plain values on all ranks, and nothing that came over the network is run."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.forked_runs import ForkedRuns


def test_values_of_two_ranks(forked: ForkedRuns, tmp_path: Path) -> None:
    ranks = forked.start("ddp", [tmp_path / "canary"], 2, tmp_path / "log", "gather.py")
    assert forked.wait(ranks) == dict.fromkeys(ranks, 0), (tmp_path / "log").read_text()
    assert not (tmp_path / "canary").exists()
