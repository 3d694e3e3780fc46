"""What several processes print: a start-up report, lines of progress, and nothing twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.helpers.forked_runs import ForkedRuns


def test_libraries_are_quiet(forked: ForkedRuns, parity_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ("train.steps=4", "mode_schedule={}", "validation.every=0", "checkpoint.every_steps=0")
    forked.succeed("zero3", folder, 2, parity_config, *settings)
    lines = folder.with_suffix(".log").read_text().splitlines()
    assert [line for line, count in Counter(lines).items() if count > 1] == []
    ours = re.compile(r"run |  \w+ +|step \d|checkpoint at|DeepSpeed .* built successfully$")
    assert [line for line in lines if not ours.match(line)] == []
    assert sum(line.startswith("step ") for line in lines) == 4, "by one process"
