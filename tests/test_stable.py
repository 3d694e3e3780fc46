"""What is changed or removed of what docs/stability.md calls stable is named in the changelog.

A new name breaks nothing, so it needs no line. The list is `stable.json` of the newest folder in tests/fixtures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import yaml

from mmldlm import __version__
from mmldlm.settings.successors import REMOVED, REMOVED_WORDS, RENAMED
from mmldlm.utils.short_repr import short_repr
from scripts.release_fixtures import FIXTURES, stable
from tests.helpers.paths import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def version_of(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split(".")))


NEWEST = max((path.name for path in FIXTURES.iterdir()), key=version_of)
RELEASED: dict[str, Any] = json.loads((FIXTURES / NEWEST / "stable.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def present() -> dict[str, Any]:
    return stable()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return how each name differs that was changed or removed."""
    return {
        name: f"`{name}`: {short_repr(value)} -> {short_repr(now[name]) if name in now else 'nothing'}"
        for name, value in before.items()
        if name not in now or now[name] != value
    }


def not_named(names: Iterable[str], changelog: str) -> list[str]:
    """Return the names that the section "Unreleased" of a changelog does not have in backticks."""
    section = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    assert section, 'CHANGELOG.md: expected a section "## Unreleased"'
    spans = {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", section[1])}
    return [name for name in names if name not in spans]


def without_advice(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the removed settings, commands and options for which `mmldlm.settings.successors` has no advice."""
    gone = []
    for name in before.keys() - now.keys():
        *parents, last = name.removeprefix("mmldlm ").split()
        if name.startswith("mmldlm ") and (last.startswith("-") or before[name] == "command"):
            if not any(" ".join([*parents, last][:count]) in REMOVED_WORDS for count in range(1, len(parents) + 2)):
                gone.append(name)
        elif re.fullmatch(r"[a-z_0-9.]+", name) and name not in {"mmldlm.load", *RENAMED, *REMOVED}:
            gone.append(name)
    return sorted(gone)


def test_a_change_of_what_is_stable_is_in_the_changelog(present: dict[str, Any]) -> None:
    changed = differences(RELEASED, present)
    if missing := not_named(changed, CHANGELOG):
        lines = "\n".join(f"  {changed[name]}" for name in missing)
        pytest.fail(
            f"{len(missing)} changes since {NEWEST} of what docs/stability.md calls stable: name each in backticks, as "
            f'here, in a line of "Unreleased" of CHANGELOG.md that says what to do, or undo it:\n{lines}',
            pytrace=False,
        )


def test_what_is_gone_says_what_to_use(present: dict[str, Any]) -> None:
    assert without_advice(RELEASED, present) == [], "add to RENAMED, REMOVED or REMOVED_WORDS of settings/successors.py"


def test_every_release_has_its_fixtures_and_section() -> None:
    """Of this version at the latest with its date in the changelog."""
    released = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)
    assert released == sorted(released, key=version_of, reverse=True) and released[-1] == "0.1.0"
    assert {path.name for path in FIXTURES.iterdir()} == {*released}, "run: python scripts/release_fixtures.py"
    assert __version__ in released or version_of(__version__) > version_of(released[0])
    assert {version for _, version in RENAMED.values()} <= {*released}, "of an old key: the last release that has it"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f"## {citation['version']} - {citation['date-released']}\n" in CHANGELOG


def test_the_list_has_what_the_page_promises(present: dict[str, Any]) -> None:
    assert present["log.every"] == "whole number, at least 1; default 10"
    assert present["mmldlm sample --weights"]["choices"] == ["ema", "trained"]
    assert {"mmldlm train", "mmldlm data verify", "mmldlm checkpoints diff --json", "kind heartbeat"} <= {*present}
    assert present["exit code 75"] == "STOPPED" and present["checkpoint format"] == 2 and present["store format"] == 1
    assert present["Model.sample(count)"] == "keyword-only int; default 1"
    assert {"mmldlm.load(path)", "mmldlm.Model(path)", "Model.modes", "Samples.texts", "Score.bits_per_token"} <= {
        *present
    }
    assert not [name for name, value in present.items() if str(ROOT) in f"{name}{value}" or " at 0x" in str(value)]


def test_planted_changes_are_found() -> None:
    before = {"log.every": "1", "log.evry": "2", "mmldlm sample --n": {"nargs": "None"}, "exit code 3": "X"}
    now = {"log.every": "7", "mmldlm sample --count": {"nargs": "None"}, "exit code 3": "X"}
    changed = differences(before, now)
    assert [*changed] == ["log.every", "log.evry", "mmldlm sample --n"], "a new name breaks nothing"
    assert changed["log.every"] == "`log.every`: '1' -> '7'" and changed["log.evry"].endswith("-> nothing")
    text = "# Changes\n\n## Unreleased\n\n- `log.every` is 7; log.evry is gone.\n- `mmldlm sample\n  --count`\n\n"
    assert not_named(changed, f"{text}## 0.1.0 - 2026-11-26\n\n- `log.evry`\n") == ["log.evry", "mmldlm sample --n"]
    assert without_advice(before, now) == ["log.evry", "mmldlm sample --n"]


def test_advice_is_required_of_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {
        "log.evry": "2",
        "mmldlm plan": "command",
        "mmldlm plan --gpus": {},
        "mmldlm track run": {},
        "Model.x": "",
    }
    assert without_advice(before, {}) == ["log.evry"]
    monkeypatch.setitem(RENAMED, "log.evry", ("log.every", "0.1.0"))
    assert without_advice(before, {}) == []
    assert without_advice({"mmldlm train --fast": {}}, {}) == ["mmldlm train --fast"]
