"""Rules of the code base that are checked by tests, so that reviewers need not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "mmldlm").rglob("*.py"))
LONGEST = 500  # lines; a file that grows past them knows two subjects


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


def test_folders_keep_their_budgets() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mmldlm"]["lines"]
    folders = {f"mmldlm/{path.name}" for path in (ROOT / "mmldlm").iterdir() if any(path.rglob("*.py"))}
    assert budgets.keys() == folders | {"benchmarks"}
    for name, budget in budgets.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / name).rglob("*.py"))
        assert lines <= budget, (
            f"{name} has {lines} lines, its budget is {budget}: what can go? Otherwise raise tool.mmldlm.lines in "
            "pyproject.toml, in a commit that says what the lines bring"
        )


def test_scripts_stop_at_the_first_error() -> None:
    for path in [*(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci" / "run"]:
        assert "set -euo pipefail" in path.read_text(encoding="utf-8"), path
