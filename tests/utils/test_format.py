"""Numbers as tables show them."""

from __future__ import annotations

import math

import pytest

from mmldlm.utils.format import format_number

pytestmark = pytest.mark.quick


def test_numbers() -> None:
    values = (None, 0.0, 0.012345, 3.14159, -999.96, 1234.56, 12345.6, math.nan)
    assert [format_number(value) for value in values] == [
        *("–", "0", "0.01235", "3.142", "-1000", "1235", "12,346", "nan")
    ]
    assert [format_number(value, 3) for value in values] == [
        *("–", "0.000", "0.012", "3.142", "-999.960", "1235", "12,346", "nan")
    ]
