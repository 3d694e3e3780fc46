"""The documentation builds as a site, with the stable API, and loads nothing from elsewhere; links lead to files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmldlm
from tests.helpers.paths import ROOT

pytest.importorskip("mkdocs", reason="mkdocs is not installed: bash scripts/setup.sh --dev")
LOADED = re.compile(
    r"""(?:<(?:script|img|iframe)[^>]*\ssrc=|<link[^>]*\shref=|url\(|@import\s)["']?((?:https?:)?//[^"')>\s]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Not --quiet, which hides warnings from --strict.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_stable_api_is_described_and_nothing_else(site: Path) -> None:
    described = set(re.findall(r'id="mmldlm\.inference\.model\.([\w.]+)"', (site / "api.html").read_text()))
    methods = {f"Model.{name}" for name in vars(mmldlm.Model) if not name.startswith("_")}
    assert len(methods) > 6 and {"load", "Model"} | methods <= described
    assert {name.partition(".")[0] for name in described} == {"load", "Model", "Samples", "Score"}


def test_no_fence_is_left_as_text(site: Path) -> None:
    assert [path.name for path in site.rglob("*.html") if "<p>```" in path.read_text(encoding="utf-8")] == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 20
    assert {str(path): urls for path in files if (urls := LOADED.findall(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "llms.txt"]
)
def test_links_and_named_files_exist(name: str) -> None:
    """Of pages outside docs/, whose links `mkdocs build --strict` sees in part, and where the site has them."""
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", text))
    if name != "CHANGELOG.md":  # which names files that are gone
        targets |= set(re.findall(r"`((?:mmldlm|tests|scripts|docs|benchmarks|configs)/[\w./-]+)`", text))
    assert targets and {target for target in targets if not (ROOT / target).exists()} == set()
