"""Paths of the repository, the virtual environment's programs and the scripts of tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPTS = ROOT / "tests" / "helpers" / "scripts"
