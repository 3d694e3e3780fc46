from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(store_path: Path, tmp_path: Path) -> Path:
    """A copy of the small store that a test may damage."""
    return Path(shutil.copytree(store_path, tmp_path / "copy"))
