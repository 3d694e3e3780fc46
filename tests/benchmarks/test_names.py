"""`python -m benchmarks NAME`."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from tests.helpers.user_errors import assert_user_error


@pytest.mark.quick
def test_a_misspelt_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert_user_error((main(["stepp"]), capsys.readouterr().err), 2, "'stepp'", "step")
