"""Incremental reader of `metrics.jsonl`: each refresh reads only what was added since the last one."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, BinaryIO

from mmldlm.errors import StorageError

Record = dict[str, Any]

# Bytes at the end of what was read, by which the file is recognized; they contain times, so no other file has them.
_TAIL_BYTES = 512


class MetricsReader:
    """The records of one metrics file, without those that a resume superseded.

    The file may be missing, grow, end in a torn line, or be replaced, as a resume does. A line that is not a record is
    skipped and counted in `damaged` instead of raising an error.

    Attributes:
        records: All records, in the order in which they were written.
        damaged: Number of lines that are not records.
    """

    def __init__(self, path: Path):
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.records: list[Record] = []
        self.damaged = 0
        self._offset, self._tail, self._partial_line = 0, b"", b""

    def refresh(self) -> bool:
        """Read what was added and return whether anything changed.

        Raises:
            StorageError: The file exists, but cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                return self._read_added(file)
        except FileNotFoundError:
            had_records = bool(self.records)
            self._reset()
            return had_records
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from None

    def _read_added(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._tail))
        replaced = file.read(len(self._tail)) != self._tail
        if replaced:
            self._reset()
            file.seek(0)
        added = file.read()
        if not added:
            return replaced
        self._offset += len(added)
        self._tail = (self._tail + added)[-_TAIL_BYTES:]
        *lines, self._partial_line = (self._partial_line + added).split(b"\n")
        for line in lines:
            self._add_line(line)
        return True

    def _add_line(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            self.damaged += bool(line.strip())
            return
        if record["kind"] in ("start", "resume"):  # later steps are trained again
            self.records = [old for old in self.records if old["step"] <= record["step"]]
        self.records.append(record)


def parse_record(line: bytes) -> Record | None:
    """Return the record in `line`, with NaN for numbers that were not finite; None if the line is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    if type(record.get("step")) is not int or type(record.get("time")) not in (int, float):
        return None
    for key in record.get("nonfinite") or []:
        if key in record:  # otherwise the key is a path into a value, such as "ranks.0.loss"
            record[key] = math.nan
    return {sys.intern(key): value for key, value in record.items()}
