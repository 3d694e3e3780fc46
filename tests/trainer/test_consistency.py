"""What must be equal on all ranks, and the lines that say what is not."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import mmldlm
from mmldlm.config import RunConfig, load_config
from mmldlm.data.store import Store
from mmldlm.settings.declaration import leaves
from mmldlm.trainer.consistency import disagreements, fingerprint, revision
from tests.helpers.sample_corpus import write_manifest

pytestmark = pytest.mark.quick


def test_fingerprint_covers_settings_data_and_versions(tiny_config: Path, tiny_store: Path) -> None:
    result = fingerprint(load_config(tiny_config), Store.open(tiny_store))
    keys = {f"config.{key}" for key, _ in leaves(RunConfig)} - {"config.data.path", "config.data.mixture"}
    versions = {f"version.{name}" for name in ("python", "mmldlm", "code", "torch", "accelerate", "deepspeed", "numpy")}
    assert set(result) == keys | versions | {"git", "data.manifest", "data.tokenizer"}
    assert all(isinstance(value, str) for value in result.values())
    assert result["config.optim.lr"] == "0.003" and result["version.mmldlm"] == mmldlm.__version__
    assert result["config.mode"] == '{"joint": 0.25, "l2t": 0.5, "t2l": 0.25}'


def test_fingerprint_reads_each_source_once_and_no_data(
    tiny_config: Path, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store, opened = load_config(tiny_config), Store.open(tiny_store), list[str]()
    open_file = io.open

    def note(path: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(io, "open", note)
    fingerprint(config, store)
    package = Path(mmldlm.__file__).parent
    assert sorted(path for path in opened if path.endswith(".py")) == sorted(map(str, package.rglob("*.py")))
    assert {Path(path).name for path in opened if path.startswith(str(tiny_store))} <= {"manifest.json"}


def test_only_a_changed_copy_of_the_store_is_refused(tiny_config: Path, tiny_store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_store, copy)
    prints = [fingerprint(load_config(tiny_config, [f"data.path={p}"]), Store.open(p)) for p in (tiny_store, copy)]
    assert disagreements(prints) == []
    write_manifest(copy, json.loads((copy / "manifest.json").read_text()))
    prints[1] = fingerprint(load_config(tiny_config, [f"data.path={copy}"]), Store.open(copy))
    (line,) = disagreements(prints)
    first, second = (result["data.manifest"][:12] for result in prints)
    assert line == f"rank 1: data.manifest is {second}, {first} on rank 0"


def test_disagreement_names_the_deviating_rank(tiny_config: Path, tiny_store: Path) -> None:
    store = Store.open(tiny_store)
    prints = [fingerprint(load_config(tiny_config, [f"optim.lr={lr}"]), store) for lr in (0.001, 0.002)]
    assert disagreements(prints) == ["rank 1: config.optim.lr is 0.002, 0.001 on rank 0"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("aaa", None),
        ("abb", "rank 1: key is b, a on rank 0"),
        ("aacb", "rank 2: key is c, a on rank 0"),
        ("a-b", "rank 1: key is absent, a on rank 0"),
        ("a ", "rank 1: key is empty, a on rank 0"),
    ],
)
def test_the_first_rank_that_differs_is_named(values: str, line: str | None) -> None:
    prints = [{"same": "x", **({} if value == "-" else {"key": value.strip()})} for value in values]
    assert disagreements(prints) == ([line] if line else [])


def test_revision_shows_changed_files(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    assert revision(package) == ""
    file = package / "code.py"
    file.write_text("x = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    clean = revision(package)
    assert len(clean) >= 4 and head.startswith(clean)
    file.write_text("x = 2\n")
    assert revision(package) == f"{clean}+changes"


def test_revision_of_a_surrounding_project_is_ignored(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    package = tmp_path / "venv" / "package"
    package.mkdir(parents=True)
    assert revision(package) == ""
