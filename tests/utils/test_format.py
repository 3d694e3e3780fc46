"""Numbers, counts and durations as users see them."""

from __future__ import annotations

import math

import pytest

from mmldlm.utils.format import format_number, human_count, human_duration

pytestmark = pytest.mark.quick


def test_numbers() -> None:
    values = (None, 0.0, 0.012345, 3.14159, -999.96, 1234.56, 12345.6, math.nan)
    assert [format_number(value) for value in values] == [
        *("–", "0", "0.01235", "3.142", "-1000", "1235", "12,346", "nan")
    ]
    assert [format_number(value, 3) for value in values] == [
        *("–", "0.000", "0.012", "3.142", "-999.960", "1235", "12,346", "nan")
    ]


def test_human_units() -> None:
    assert [human_duration(s) for s in (0.4, 59, 60, 185, 7620, 359999)] == [
        "0s", "59s", "1m 00s", "3m 05s", "2h 07m", "4d 03h",
    ]  # fmt: skip
    assert [human_count(n) for n in (7, 950, 999.9, 1234, 123456, 4.56e6)] == [
        "7", "950", "1.00k", "1.23k", "123k", "4.56M",
    ]  # fmt: skip
