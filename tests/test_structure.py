"""Rules of the code base that are checked by tests, so that reviewers need not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "mmldlm").rglob("*.py"))
LONGEST = 500  # lines; a file that grows past them knows two subjects
SLACK = 0.03


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_only_distributed_imports_the_engines() -> None:
    engines = ("accelerate", "deepspeed", "torch.distributed")
    offenders = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if (ROOT / "mmldlm" / "distributed") not in path.parents
        for name in imported(path)
        if any(name == engine or name.startswith(f"{engine}.") for engine in engines)
        and not name.startswith("accelerate.tracking")  # experiment trackers are no engines
    }
    assert offenders == set()
    assert any(name == "accelerate" for path in SOURCES for name in imported(path)), "the check sees no import at all"


def test_files_have_at_most_500_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


@pytest.mark.parametrize("folder", ["mmldlm", "tests"])
def test_lines_stay_near_their_total(folder: str) -> None:
    """A change may add what it needs; what has come to more than the slack is looked at as a whole."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    totals = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mmldlm"]["lines"]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert lines <= (1 + SLACK) * totals[folder], (
        f"{folder} has {lines:,} lines, over {SLACK:.0%} more than the {totals[folder]:,} of tool.mmldlm.lines in "
        "pyproject.toml: what can go? Otherwise raise the total, in a commit that says what the lines bring"
    )


def test_scripts_stop_at_the_first_error() -> None:
    for path in [*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci" / "run"]:
        assert "set -euo pipefail" in path.read_text(encoding="utf-8"), path


def test_the_gate_takes_the_options_that_it_names() -> None:
    text = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    named, taken = re.findall(r"^#   bash scripts/test.sh (--\w+)", text, re.M), re.findall(r"^  (--\w+)\)", text, re.M)
    assert sorted(named) == sorted(taken) != []


def test_type_checkers_know_the_attributes_of_a_loaded_model(tmp_path: Path) -> None:
    """`mmldlm.Model` is imported on first use, and its base class may be missing: either can make it `Any`."""
    program = tmp_path / "program.py"
    program.write_text("import mmldlm\n\nmmldlm.load('bundle').run.no_name\n")
    command = [sys.executable, "-m", "mypy", str(program)]  # with the cache of the gate
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert '"LoadedRun" has no attribute "no_name"' in found, found
