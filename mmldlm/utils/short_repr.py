"""Short single-line representations of values and names for error messages."""

from __future__ import annotations

import reprlib
from typing import Any

_MAX_CHARS = 120  # of one value


class _Repr(reprlib.Repr):
    """`repr` of the first few items only, so that recursive and repetitive values stay short."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 6
        self.maxstring = self.maxother = self.maxlong = _MAX_CHARS

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to convert very large integers to text.
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"a number of {x.bit_length()} bits"


_REPR = _Repr()


def truncate(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return `text` with its middle replaced by `...` if it has more than `max_chars` characters."""
    half = (max_chars - 3) // 2
    return text if len(text) <= max_chars else f"{text[:half]}...{text[-half:]}"


def short_repr(value: Any) -> str:
    """Return `repr(value)`, abbreviated."""
    return truncate(_REPR.repr(value))


def display_name(name: Any) -> str:
    """Return a key or path without quotes, abbreviated; as `short_repr` if it is not printable text."""
    return truncate(name, 2 * _MAX_CHARS) if isinstance(name, str) and name.isprintable() else short_repr(name)
