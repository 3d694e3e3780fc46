"""Texts of others cannot command the terminal that they are printed on."""

from __future__ import annotations

import pytest

from mmldlm.utils.printable import printable

pytestmark = pytest.mark.quick


def test_control_characters_are_escaped_and_words_of_all_languages_stay() -> None:
    assert printable("na\u00efve \u65e5\u672c, \U0001f600") == "na\u00efve \u65e5\u672c, \U0001f600"
    # Escape sequences (7 and 8 bit), a line that overwrites the one before, and text that runs backwards.
    assert printable("a\x1b]0;title\x07b\x9b2J") == "a\\x1b]0;title\\x07b\\x9b2J"
    assert printable("ok\rbad\n\u202ecba") == "ok\\rbad\\n\\u202ecba"
    everything = "".join(map(chr, range(0x110000)))
    assert printable(printable(everything)) == printable(everything) and printable(everything).isprintable()
