"""`mmldlm bench` in an installation without the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import ROOT


def test_without_a_source_tree(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mmldlm", tmp_path / "mmldlm")
    command = [sys.executable, "-m", "mmldlm.cli", "bench"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mmldlm: error: bench: there is no benchmarks/ in {tmp_path}; run it in a checkout")
