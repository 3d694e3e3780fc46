"""The ledger of races: a JSON object a line, appended, and never changed.

A line of kind `race` has base and options of the proposals after it. `proposal` is written when one arrives, and has
its number; `result` after each look at it, and has the decision if there is one. What was not decided when a race was
killed is decided by the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmldlm.errors import DataError
from mmldlm.utils.files import make_folder
from mmldlm.utils.nested import replace_nonfinite
from mmldlm.utils.short_repr import short_repr


class Ledger:
    """The file; a last line that a kill has torn is dropped. One that cannot be read is a `DataError`."""

    def __init__(self, path: Path):
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        self._end = content.rfind(b"\n") + 1
        self.lines: list[dict[str, Any]] = []
        for number, line in enumerate(content[: self._end].splitlines(), start=1):
            try:
                self.lines.append(dict(json.loads(line)))
                self.lines[-1]["kind"]
            except (ValueError, TypeError, KeyError):
                found = short_repr(line.decode(errors="replace"))
                raise DataError(f"{path}: line {number}: expected one of `mmldlm race`, found {found}") from None

    def of_kind(self, kind: str, **values: Any) -> list[dict[str, Any]]:
        """Return the lines of a kind that have these values."""
        return [line for line in self.lines if {"kind": kind, **values}.items() <= line.items()]

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines at once, so that they are there after a crash."""
        make_folder(self.path.parent)
        added = [replace_nonfinite(dict(line)) for line in lines]
        with self.path.open("ab") as file:
            file.truncate(self._end)
            file.write(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in added))
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        self.lines += added
