"""Make text from elsewhere safe to print on a terminal."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^@\s]*@")  # the part user:password@ of a URL


def hide_passwords(text: str) -> str:
    """Remove the passwords from URLs in a text, for example from a proxy's URL in a library's message."""
    return _PASSWORD.sub(r"\1:...@", text)


def printable(text: str) -> str:
    """Return a text as one line without passwords. Control characters, which a terminal would obey, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in hide_passwords(text))
