"""What is generated from the code matches it: tables of settings.md and engines.md in docs, and configs/schema.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.config import RunConfig
from mmldlm.settings.declaration import leaves
from scripts.docs import generated
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs" / "settings.md"
ROWS = {line.split("`")[1]: line for line in generated()[PAGE].splitlines() if line.startswith("| `")}


@pytest.mark.parametrize(("path", "content"), generated().items(), ids=lambda value: getattr(value, "name", ""))
def test_files_are_up_to_date(path: Path, content: str) -> None:
    assert path.read_text(encoding="utf-8") == content, "run: python scripts/docs.py"


def test_every_setting_has_one_row_of_four_cells() -> None:
    assert sorted(ROWS) == sorted(key for key, _ in leaves(RunConfig))
    assert {row.replace("\\|", "").count("|") for row in ROWS.values()} == {5}


def test_advice_is_in_the_rows_of_its_settings() -> None:
    advice = {key: field.metadata["advice"] for key, field in leaves(RunConfig) if field.metadata["advice"]}
    assert len(advice) > 40 and all(f". *{text}* |" in ROWS[key] for key, text in advice.items())
