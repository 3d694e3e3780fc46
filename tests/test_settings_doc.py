"""docs/settings.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmldlm.config import RunConfig
from mmldlm.schema import leaves
from mmldlm.settings_doc import settings_markdown

pytestmark = pytest.mark.quick
PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"


def test_the_page_is_as_the_code_would_write_it_now() -> None:
    found = PAGE.read_text(encoding="utf-8")
    assert found == settings_markdown(), "run: python -m mmldlm.settings_doc > docs/settings.md"


def test_every_setting_has_one_row_of_four_cells() -> None:
    rows = [line for line in settings_markdown().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(key for key, _ in leaves(RunConfig))
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}
