"""`printable`: text of others on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text as one line in which control characters, such as those that a terminal obeys, are escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
