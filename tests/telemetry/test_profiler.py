"""Traces of chosen steps on chosen ranks: readable by Perfetto, with the phases of the loop, and a table."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from mmldlm import train
from mmldlm.errors import ConfigError
from mmldlm.settings.fields import build
from mmldlm.telemetry.profiler import ProfileConfig
from tests.helpers.forked_runs import ForkedRuns

SETTINGS = ("train.steps=6", "validation.every=0", "checkpoint.every_steps=0")


def phases(folder: Path, rank: int) -> Counter[str]:
    trace = gzip.decompress((folder / "profile" / f"trace.rank{rank}.json.gz").read_bytes())
    events = json.loads(trace)["traceEvents"]
    assert all({"ph", "pid"} <= event.keys() for event in events), "what Perfetto's JSON importer asks for"
    names = Counter(event["name"] for event in events if event["ph"] == "X")
    assert names["aten::mm"] or names["aten::addmm"]
    return Counter({name.removeprefix("mmldlm: "): names[name] for name in names if name.startswith("mmldlm: ")})


def test_configured_steps_are_profiled(parity_config: Path, tmp_path: Path) -> None:
    """The first step may be among them, and the run may end before the last of them."""
    command = [str(parity_config), *SETTINGS, "train.steps=2", f"run.dir={tmp_path}", "profile.steps=[1, 9]"]
    assert train.main(command) == 0
    expected = {"corrupt": 2, "sync": 2, "forward": 8, "backward": 8, "update": 2}
    assert phases(tmp_path, 0) == expected, "of 8 samples in micro-batches of 2"
    assert "aten::" in (tmp_path / "profile" / "operations.rank0.txt").read_text()


def test_configured_ranks_are_profiled(parity_config: Path, forked: ForkedRuns, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    forked.succeed("ddp", folder, 2, parity_config, *SETTINGS, "profile.steps=[2, 3]", "profile.ranks=[1]")
    assert phases(folder, 1)["forward"] == 4
    assert [path.name for path in (folder / "profile").glob("trace*")] == ["trace.rank1.json.gz"]


@pytest.mark.quick
@pytest.mark.parametrize("steps", [[3], [0, 2], [4, 3], [1, 2, 3]])
def test_invalid_step_ranges_are_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected \\[first, last\\] with 1 <= first <= last"):
        build(ProfileConfig, {"steps": steps})
