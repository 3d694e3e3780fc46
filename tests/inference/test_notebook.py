"""examples/first_steps.ipynb on a small run: its cells are plain Python, so no notebook program is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmldlm import cli
from tests.helpers.paths import ROOT
from tests.helpers.waiting import TEST_TIMEOUT_S

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def code_cells() -> list[dict[str, list[str]]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_notebook_shows_what_its_cells_print() -> None:
    cells = code_cells()
    assert len(cells) > 5 and all(cell["outputs"] for cell in cells)
    assert not any(ROOT.as_posix() in line for cell in cells for line in json.dumps(cell["outputs"]).splitlines())


@pytest.mark.slow
def test_cells_run(tmp_path: Path, short_run_dir: Path) -> None:
    assert cli.main(["export", str(short_run_dir), str(tmp_path / "bundle")]) == 0
    (tmp_path / "examples").mkdir()
    program = "\n".join("".join(cell["source"]) + "\nprint(chr(30))" for cell in code_cells())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        cwd=tmp_path / "examples",
        env=environment,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(chr(30))[:-1]
    assert len(printed) == len(code_cells()) and "bits a token" in printed[-1]
