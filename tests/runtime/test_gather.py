"""`Runtime.gather`: the same plain values on all ranks, and nothing that came over the network is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine_runs import ROOT
from ports import free_port


def test_values_of_two_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("gathering_rank.py")
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "canary")],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    assert not (tmp_path / "canary").exists()
