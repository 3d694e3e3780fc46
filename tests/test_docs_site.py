"""The documentation builds as a site, with every module in the API reference, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: bash scripts/setup.sh --dev")
LOADED = re.compile(
    r"""(?:<(?:script|img|iframe)[^>]*\ssrc=|<link[^>]*\shref=|url\(|@import\s)["']?((?:https?:)?//[^"')>\s]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_api_reference_is_complete(site: Path) -> None:
    anchors = {
        name for page in (site / "api").glob("*.html") for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "mmldlm").rglob("*.py"))
    modules = {name.removesuffix(".__init__") for name in names if "._" not in name.removesuffix(".__init__")}
    assert len(modules) > 50 and modules - anchors == set()
    assert "mmldlm.diffusion.objective.Objective.corrupt" in anchors


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 20
    assert {str(path): urls for path in files if (urls := LOADED.findall(path.read_text(encoding="utf-8")))} == {}
