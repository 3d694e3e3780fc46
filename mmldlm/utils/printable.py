"""`printable`: text of others on a terminal."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^@\s]*@")  # of a URL: user:password@


def hide_passwords(text: str) -> str:
    """Return a text without the passwords in its URLs, such as that of a proxy in the message of a library."""
    return _PASSWORD.sub(r"\1:...@", text)


def printable(text: str) -> str:
    """Return a text as one line without passwords, in which control characters, which a terminal obeys, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in hide_passwords(text))
