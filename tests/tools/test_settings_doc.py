"""docs/settings.md says what the code says."""

from __future__ import annotations

import pytest

from mmldlm.config import RunConfig
from mmldlm.settings.fields import leaves
from mmldlm.settings.layers import MAX_EXTENDS_DEPTH, MAX_FILES
from mmldlm.settings.yaml import MAX_BYTES
from mmldlm.tools.settings_advice import ADVICE
from mmldlm.tools.settings_doc import settings_markdown
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.quick
PAGE = ROOT / "docs" / "settings.md"


def test_the_page_is_as_the_code_would_write_it_now() -> None:
    found = PAGE.read_text(encoding="utf-8")
    assert found == settings_markdown(), "run: python -m mmldlm.tools.settings_doc > docs/settings.md"


def test_every_setting_has_one_row_of_four_cells() -> None:
    rows = [line for line in settings_markdown().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(key for key, _ in leaves(RunConfig))
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_advice_is_of_settings_and_in_their_rows() -> None:
    assert ADVICE.keys() <= {key for key, _ in leaves(RunConfig)}, "advice for a key that is not there"
    rows = {line.split("`")[1]: line for line in settings_markdown().splitlines() if line.startswith("| `")}
    assert all(f". *{advice}* |" in rows[key] for key, advice in ADVICE.items())


def test_what_the_page_says_of_files_is_so() -> None:
    page = " ".join(settings_markdown().split())
    assert f"chains of more than {MAX_EXTENDS_DEPTH} and more than {MAX_FILES} files or {MAX_BYTES >> 10} KiB" in page
