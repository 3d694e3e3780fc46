"""The ledger of races: a file with one JSON object per line, which is only appended to.

A line of kind `race` has the base and the options of the proposals that follow. A `proposal` is written when it
arrives, with its number. A `result` is written after each look, with the decision if there is one. If a race was
killed, the next race decides what was still open.
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
    """The ledger's file. A last line that a kill has torn is dropped. Raises `DataError` if it cannot be read."""

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
                raise DataError(
                    f"{path}: line {number}: expected a line that `mmldlm race` writes, found {found}"
                ) from None

    def of_kind(self, kind: str, **values: Any) -> list[dict[str, Any]]:
        """Return the lines of a kind with the given values."""
        return [line for line in self.lines if {"kind": kind, **values}.items() <= line.items()]

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines in one synchronized write, so that they survive a crash."""
        make_folder(self.path.parent)
        added = [replace_nonfinite(dict(line)) for line in lines]
        with self.path.open("ab") as file:
            file.truncate(self._end)
            file.write(b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in added))
            file.flush()
            os.fsync(file.fileno())
            self._end = file.tell()
        self.lines += added
