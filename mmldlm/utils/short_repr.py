"""Values and names as error messages show them: on one line, and short whatever they are."""

from __future__ import annotations

import reprlib
from typing import Any

_LONGEST = 120  # characters of one value


class _Repr(reprlib.Repr):
    """Looks at the first few items only, so that what refers to itself or repeats itself ends soon."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 6
        self.maxstring = self.maxother = self.maxlong = _LONGEST

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out the largest.
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"a number of {x.bit_length()} bits"


_REPR = _Repr()


def cut(text: str, longest: int = _LONGEST) -> str:
    """`text` in at most `longest` characters: without its middle where it has more."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def shown(value: Any) -> str:
    """`repr(value)`, abbreviated."""
    return cut(_REPR.repr(value))


def named(name: Any) -> str:
    """A key or path as it is, without quotes; abbreviated, and as `repr` where it is no plain text."""
    return cut(name, 2 * _LONGEST) if isinstance(name, str) and name.isprintable() else shown(name)
