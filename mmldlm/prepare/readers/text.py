"""Read text with a document per line, per block of lines, per JSON line or item, or per row of CSV."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from mmldlm.errors import DataError
from mmldlm.prepare.documents import (
    TEXT_FORMATS,
    Columns,
    Document,
    DocumentStream,
    Format,
    Part,
    Problem,
    ProblemKind,
    to_weight,
)
from mmldlm.prepare.readers.files import is_compressed, open_text, suffix_format
from mmldlm.utils.short_repr import short_repr

_Lines: TypeAlias = Iterable[tuple[int, bytes]]  # line number and line
_Fault: TypeAlias = tuple[ProblemKind, str]
_Records: TypeAlias = Iterator[tuple[int, Any]]  # line number, and a text, a JSON value, a row by column, or a `_Fault`
_READ_BYTES = 1 << 20
_EMPTY: _Fault = ("empty", "empty document")


def text_parts(path: str, target_bytes: int, format: Format, separator: str | None = None) -> list[Part]:
    """Cut a text file into parts of whole lines (or whole blocks), each as short as possible but `target_bytes` long.

    A compressed file is one part. So are JSON and CSV, where a document may span lines.
    """
    if is_compressed(path) or format not in ("lines", "blocks", "jsonl"):
        return [Part(path, 0, sys.maxsize)]
    parts: list[Part] = []
    start, line = 0, 1
    with open_text(path) as file:
        size = file.seek(0, 2)  # also of a URL
        while start < size:
            stop = size
            if start + target_bytes < size:
                stop = _next_boundary(file, start + target_bytes, format == "blocks", separator)
            parts.append(Part(path, start, stop, line))
            if stop < size:
                file.seek(start)
                line += sum(
                    file.read(min(_READ_BYTES, stop - offset)).count(b"\n")
                    for offset in range(start, stop, _READ_BYTES)
                )
            start = stop
    return parts


def _next_boundary(file: BinaryIO, min_offset: int, of_blocks: bool, separator: str | None) -> int:
    """Return the first offset >= `min_offset` where a line begins, or, for blocks, a line after a block's end."""
    # One byte earlier: if that byte ends a line, `min_offset` itself is a boundary.
    file.seek(min_offset - 1)
    line = file.readline()
    while line and of_blocks:
        line = file.readline()
        if _ends_block(_decode(line), separator):
            break
    return file.tell()


def _ends_block(line: str | _Fault, separator: str | None) -> bool:
    """Return whether a line ends a block: a blank one, or the separator."""
    return isinstance(line, str) and line.strip() == (separator or "").strip()


def read_text(
    part: Part,
    field: str,
    format: Format = "lines",
    columns: Columns = Columns(),  # noqa: B008
    key_optional: bool = False,
    separator: str | None = None,
) -> DocumentStream:
    """Yield the documents and problems of a part of a text file, in one of `TEXT_FORMATS`.

    Args:
        field: The field of JSON (see `_value`), or column of CSV, with the text.
        columns: The fields with the key, the group, the prefix and the weight. The prefix may be empty.
        key_optional: Allow records that lack all of these but the text.
        separator: The line that ends a block, by default a blank one.
    """
    texts = {"text": field, "prefix": columns.prefix or ""}
    ids = {"key": columns.key or "", "group": columns.group or ""}
    named = {*texts.values(), *ids.values(), columns.weight or ""} - {""}
    with open_text(part.path) as file:
        lines = _lines(file, part)
        for line, record in _block_records(lines, separator) if format == "blocks" else _RECORDS[format](lines):
            values: dict[str, Any] = {"text": record}
            if format not in ("lines", "blocks") and not isinstance(record, tuple):
                present = {field, *record} - {""} if isinstance(record, dict) and key_optional else named
                values = {name: _row_text(record, column) for name, column in texts.items() if column in present}
                values |= {name: _row_id(record, column) for name, column in ids.items() if column in present}
                if columns.weight and columns.weight in present:
                    values["weight"] = _row_weight(record, columns.weight)
            faults = [value for value in values.values() if isinstance(value, tuple)]
            if isinstance(values["text"], str) and not values["text"].strip():
                faults = [_EMPTY]
            if faults:
                yield Problem(part.path, line, *faults[0])
            else:
                prefix = values.pop("prefix", "").strip()
                yield Document(source=part.path, line=line, prefix=prefix, **values)


def read_texts(path: Path, with_prefix: bool) -> list[Document | Problem]:
    """Read a file of texts: a text per line, or JSON objects with `text` and optionally `id` and `prefix` (.jsonl).

    Raises:
        DataError: The file is empty or cannot be read.
    """
    format = suffix_format(str(path))
    if format not in TEXT_FORMATS:
        raise DataError(
            f"{path}: expected a text per line (.txt), or .jsonl, .json, .csv or .tsv with the field 'text'"
        )
    (part,) = text_parts(str(path), sys.maxsize, format) or [Part(str(path), 0, 0)]
    items = [*read_text(part, "text", format, Columns(key="id", prefix="prefix" if with_prefix else None), True)]
    if not items:
        raise DataError(f"{path}: expected a text per line, found an empty file")
    return items


def _lines(file: BinaryIO, part: Part) -> _Lines:
    if part.start:  # a compressed file cannot be sought in
        file.seek(part.start)
    remaining = part.stop - part.start
    for number, line in enumerate(file, part.first_line):
        yield number, line
        remaining -= len(line)
        if remaining <= 0:
            return


def _decode(line: bytes) -> str | _Fault:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "unreadable", f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
    return text.removeprefix("\ufeff").rstrip("\r\n")


def _block_records(lines: _Lines, separator: str | None) -> _Records:
    """Yield blocks of lines between blank lines or separators. A block with an unreadable line is one problem."""
    start, block = 0, list[str]()
    problem: tuple[int, _Fault] | None = None
    for number, line in chain(lines, [(0, b"")]):  # line 0, at the end, completes the last block
        text = _decode(line)
        if isinstance(text, tuple):
            problem = problem or (number, text)
        elif number and not _ends_block(text, separator):
            if block or text.strip():  # blank lines at the start of a block are not part of it
                start = start or number
                block.append(text)
        else:
            if problem:
                yield problem
            elif block:
                yield start, "\n".join(block).rstrip("\n")
            start, block, problem = 0, [], None


def _json_records(lines: _Lines) -> _Records:
    for number, line in lines:
        text = _decode(line)
        yield number, _EMPTY if isinstance(text, str) and not text.strip() else _parse_json(text)


def _array_records(lines: _Lines) -> _Records:
    """Yield the items of a JSON array, numbered from 1, or the objects of JSON lines in a file with this suffix."""
    lines = list(lines)
    values = _parse_json(_decode(b"".join(line for _, line in lines)))
    if isinstance(values, list):
        yield from enumerate(values, 1)
    elif isinstance(next((record for _, record in _json_records(lines) if record != _EMPTY), None), dict):
        yield from _json_records(lines)
    elif isinstance(values, tuple):
        yield 1, values
    else:
        yield 1, ("invalid", f"a JSON {type(values).__name__}, expected an array or objects, one a line")


def _parse_json(text: str | _Fault) -> Any:
    try:
        return text if isinstance(text, tuple) else json.loads(text)
    except (ValueError, RecursionError) as error:
        return "invalid", f"not valid JSON: {error}"


def _csv_records(lines: _Lines, delimiter: str = ",") -> _Records:
    """Yield the rows below a header, each with the number of its first line."""
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become half surrogate pairs, which `_row_text` reports in the columns that we read.
    decoded = (line.decode("utf-8", "surrogateescape").removeprefix("\ufeff") for _, line in lines)
    reader = csv.reader(decoded, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, ("invalid", f"not valid CSV: {error}")
            continue
        if header is None:
            header = row
            if repeated := [name for name in header if header.count(name) > 1]:
                yield number, ("invalid", f"column {repeated[0]!r} is there {header.count(repeated[0])} times")
                return
        elif not row:
            yield number, _EMPTY
        elif len(row) != len(header):
            yield number, ("invalid", f"{len(row)} columns, expected {len(header)} as in the header")
        else:
            yield number, dict(zip(header, row, strict=True))


_RECORDS: dict[Format, Callable[[_Lines], _Records]] = {
    "lines": lambda lines: ((number, _decode(line)) for number, line in lines),
    "jsonl": _json_records,
    "json": _array_records,
    "csv": _csv_records,
    "tsv": lambda lines: _csv_records(lines, "\t"),
}


def _value(row: Mapping[str, Any], field: str) -> Any:
    """Return a field of a JSON object: a key, or else a path of keys and places, such as `messages.-1.content`.

    Raises:
        KeyError: There is none. The argument names what is there.
    """
    if field in row:
        return row[field]
    value: Any = row
    path = ""
    for part in field.split("."):
        is_place = isinstance(value, list) and re.fullmatch(r"-?\d+", part) and -len(value) <= int(part) < len(value)
        if not is_place and not (isinstance(value, dict) and part in value):
            names = sorted(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            raise KeyError(", ".join(repr(f"{path}{name}") for name in names[:8]) or "none")
        value = value[int(part) if is_place else part]
        path += f"{part}."
    return value


def _row_text(row: Any, field: str) -> str | _Fault:
    """Return a text of a JSON object or a row, or the fault in it."""
    if not isinstance(row, dict):
        return "invalid", f"a JSON {type(row).__name__}, expected an object with the field {field!r}"
    try:
        text = _value(row, field)
    except KeyError as error:
        return "invalid", f"no field {field!r}, found {error.args[0]}"
    if not isinstance(text, str):
        return "invalid", f"field {field!r} is {type(text).__name__}, expected a string"
    try:
        # JSON can spell half a surrogate pair by an escape. Tokenizers and files cannot hold it.
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "unreadable", f"field {field!r} is not valid Unicode"
    return text


def _row_weight(row: Any, field: str) -> float | _Fault:
    """Return the weight of a document, or the fault in it."""
    value = None
    with suppress(KeyError):
        value = _value(row, field) if isinstance(row, dict) else None
    if (weight := to_weight(value)) is None:
        return "invalid", f"field {field!r} is {short_repr(value)}, expected a weight of at least 0"
    return weight


def _row_id(row: Any, field: str) -> str | _Fault:
    """Return the id of a document or of its group, or the fault in it."""
    value = None
    with suppress(KeyError):
        value = _value(row, field) if isinstance(row, dict) else None
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        return "invalid", f"field {field!r} is {type(value).__name__}, expected the document's id, a string or integer"
    return str(value)
