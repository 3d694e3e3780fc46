"""Places in the repository that tests start processes from."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SCRIPTS = ROOT / "tests" / "helpers" / "scripts"
