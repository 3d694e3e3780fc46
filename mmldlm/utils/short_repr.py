"""Short one-line representations of values and names for error messages."""

from __future__ import annotations

import reprlib
from typing import Any

_MAX_CHARS = 120  # of one value
_REPR = reprlib.Repr()  # only the first few items, so that long lists stay short
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxstring = 3, 6, 6, _MAX_CHARS
_REPR.maxother = _REPR.maxlong = _MAX_CHARS


def truncate(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return `text`, with its middle replaced by `...` if it is longer than `max_chars` characters."""
    half = (max_chars - 3) // 2
    return text if len(text) <= max_chars else f"{text[:half]}...{text[-half:]}"


def short_repr(value: Any) -> str:
    """Return `repr(value)`, abbreviated."""
    return truncate(_REPR.repr(value))


def display_name(name: Any) -> str:
    """Return a key or path without quotes, shortened. Anything but printable text is shown as in `short_repr`."""
    return truncate(name, 2 * _MAX_CHARS) if isinstance(name, str) and name.isprintable() else short_repr(name)
