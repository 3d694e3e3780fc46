"""docs/settings.md matches the code."""

from __future__ import annotations

import pytest

from mmldlm.config import RunConfig
from mmldlm.settings.declaration import leaves
from mmldlm.settings.yaml import MAX_BYTES
from mmldlm.tools.settings_doc import settings_markdown
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs" / "settings.md"


def test_page_is_up_to_date() -> None:
    result = PAGE.read_text(encoding="utf-8")
    assert result == settings_markdown(), "run: python -m mmldlm.tools.settings_doc > docs/settings.md"


def test_every_setting_has_one_row_of_four_cells() -> None:
    rows = [line for line in settings_markdown().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(key for key, _ in leaves(RunConfig))
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_advice_is_in_the_rows_of_its_settings() -> None:
    rows = {line.split("`")[1]: line for line in settings_markdown().splitlines() if line.startswith("| `")}
    advice = {key: field.metadata["advice"] for key, field in leaves(RunConfig) if field.metadata["advice"]}
    assert len(advice) > 40 and all(f". *{text}* |" in rows[key] for key, text in advice.items())


def test_limits_on_the_page_match_the_code() -> None:
    page = " ".join(settings_markdown().split())
    assert f"files above {MAX_BYTES >> 10} KiB are refused" in page
