"""`metrics.jsonl` as its readers need it: each look reads only what was added since the last one."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, BinaryIO

from mmldlm.errors import StorageError

Record = dict[str, Any]

_SEEN_BYTES = 512  # of the end of what was read, by which a file is known again; the times in it are like no other's


class Records:
    """The records of the run whose metrics file is `path`, without those that a resume superseded.

    The file may not be there yet, grow, end in a torn line, or be replaced, as a resume does. A line that is no record
    is left out and counted in `damaged`: review is no reason to stop.
    """

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.all: list[Record] = []
        self.damaged = 0
        self._read, self._end, self._torn = 0, b"", b""

    def refresh(self) -> bool:
        """Whether there is anything new; StorageError where the file is there, but cannot be read."""
        try:
            with self.path.open("rb") as file:
                return self._read_on(file)
        except FileNotFoundError:
            had = bool(self.all)
            self._forget()
            return had
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None

    def _read_on(self, file: BinaryIO) -> bool:
        file.seek(self._read - len(self._end))
        replaced = file.read(len(self._end)) != self._end
        if replaced:
            self._forget()
            file.seek(0)
        added = file.read()
        if not added:
            return replaced
        self._read += len(added)
        self._end = (self._end + added)[-_SEEN_BYTES:]
        *lines, self._torn = (self._torn + added).split(b"\n")
        for line in lines:
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        record = parse(line)
        if record is None:
            self.damaged += bool(line.strip())
            return
        if record["kind"] in ("start", "resume"):  # later steps are done again
            self.all = [old for old in self.all if old["step"] <= record["step"]]
        self.all.append(record)


def parse(line: bytes) -> Record | None:
    """A record, in which numbers that were not finite are NaN; None where the line is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step")) is not int or type(record.get("time")) not in (int, float):
        return None
    for key in record.get("nonfinite") or []:
        if key in record:  # else a part of a value, as in "ranks.0.loss"
            record[key] = math.nan
    return {sys.intern(key): value for key, value in record.items()}
