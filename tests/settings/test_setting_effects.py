"""No setting that does nothing: each key has an entry in `effects`, which is shown to be true."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mmldlm.config import RunConfig
from mmldlm.settings.fields import leaves
from tests.helpers.observed_run import SIGHTS, Sight, observe
from tests.helpers.paths import ROOT
from tests.helpers.setting_effects import EFFECTS, WRITTEN, Run, ShownBy

KEYS = [key for key, _ in leaves(RunConfig)]
HOW_TO = f"""
In tests/helpers/setting_effects.py add for each of them, with a value that is not its default,
    "KEY": Run("VALUE", sees="WHAT")
where two runs of three steps then differ in WHAT:
{chr(10).join(f"    {sight:<11} {what}" for sight, what in SIGHTS.items())}
or, where no such run can show it, ShownBy("tests/FILE.py::TEST"): a test that fails when the key is ignored."""


def without_entry(keys: Iterable[str], entries: Collection[str]) -> list[str]:
    return [key for key in keys if key not in entries]


@pytest.mark.quick
def test_every_key_has_an_entry() -> None:
    missing = without_entry(KEYS, EFFECTS)
    assert not missing, f"nothing shows that these settings do anything: {', '.join(missing)}.{HOW_TO}"
    gone = without_entry(EFFECTS, KEYS)
    assert not gone, f"effects.py has entries of keys that no longer are: {', '.join(gone)}; take them out"
    assert without_entry(["optim.lr", "optim.new"], EFFECTS) == ["optim.new"], "the check is blind"


# --- by a test elsewhere ------------------------------------------------------------------------------------------


def complaint(key: str, test: str) -> str:
    """Why `test` (FILE::NAME) can be no proof of `key`; "" where it may be one."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return f"{file} is not there"
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    if name not in functions or not name.startswith("test_"):
        return f"{file} has no test {name!r}"
    if any(ast.unparse(mark).startswith(("pytest.mark.slow", "pytest.mark.gpu")) for mark in marks(module, name)):
        return f"{test} is not run by default"
    if key.rpartition(".")[2] not in source(text, module, functions[name]):
        return f"{test} does not name {key}"
    return ""


def marks(module: ast.Module, name: str) -> list[ast.expr]:
    """Decorators of the test `name`, and marks of its whole file."""
    found: list[ast.expr] = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found += node.decorator_list
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found += node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return found


def source(text: str, module: ast.Module, test: ast.FunctionDef) -> str:
    """A test with its decorators, and the constants of its file that it uses."""
    used = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    constants = [node for node in module.body if isinstance(node, ast.Assign) and used & assigned(node)]
    parts = [test, *test.decorator_list, *constants]
    return "\n".join(ast.get_source_segment(text, part) or "" for part in parts)


def assigned(node: ast.Assign) -> set[str]:
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


@pytest.mark.quick
@pytest.mark.parametrize("key", [key for key, how in EFFECTS.items() if isinstance(how, ShownBy)])
def test_what_is_shown_elsewhere_is_there(key: str) -> None:
    how = EFFECTS[key]
    assert isinstance(how, ShownBy)
    found = complaint(key, how.test)
    assert not found, f"{key}: {found}.{HOW_TO}"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/none.py::test_x", "tests/none.py is not there"),
        ("tests/integration/test_train.py::test_none", "has no test 'test_none'"),
        ("tests/integration/test_train.py::records", "has no test 'records'"),
        ("tests/integration/test_train.py::test_bf16_follows_fp32", "does not name optim.lr"),
        ("tests/distributed/test_engine_parity.py::test_four_processes_follow_one", "is not run by default"),
        ("tests/integration/test_train.py::test_changed_learning_rate_is_allowed_and_shown", ""),
    ],
)
def test_the_check_of_tests_is_not_blind(test: str, expected: str) -> None:
    found = complaint("optim.lr", test)
    assert expected in found and bool(expected) == bool(found)


# --- by two runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Callable[..., Mapping[Sight, Any]]:
    """What a run with these settings shows; each is trained once."""
    known: dict[tuple[object, ...], Mapping[Sight, Any]] = {}

    def look(*settings: str, samples: bool) -> Mapping[Sight, Any]:
        if (settings, samples) not in known:
            folder = tmp_path_factory.mktemp("run") / "run"
            known[settings, samples] = observe(folder, tiny_store, *settings, samples=samples)
        return known[settings, samples]

    return look


@pytest.mark.parametrize("key", [key for key, how in EFFECTS.items() if isinstance(how, Run)])
def test_effect(key: str, seen: Callable[..., Mapping[Sight, Any]]) -> None:
    how = EFFECTS[key]
    assert isinstance(how, Run)
    samples = how.sees == "latents"
    without = seen(*how.under, samples=samples)
    with_it = seen(*how.under, f"{key}={how.value}", samples=samples)
    assert without[how.sees] != with_it[how.sees], (
        f"{key}={how.value} changes nothing of {how.sees} ({SIGHTS[how.sees]}): either nothing comes of the setting, "
        "or its entry in tests/helpers/setting_effects.py should look elsewhere"
    )


def test_runs_that_differ_in_nothing_look_the_same(tiny_store: Path, tmp_path: Path) -> None:
    first, second = (observe(tmp_path / name, tiny_store, *WRITTEN, samples=True) for name in ("a", "b"))
    assert first.keys() == second.keys() == SIGHTS.keys()
    assert [sight for sight in SIGHTS if first[sight] != second[sight]] == []
    assert all(first[sight] for sight in SIGHTS if sight != "workers"), "a sight that shows nothing"
