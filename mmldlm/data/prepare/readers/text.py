"""Readers of text: a document per line, per block of lines, per JSON line or item, or per row of CSV."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from mmldlm.data.prepare.documents import Document, Format, Part, Problem, ProblemKind
from mmldlm.data.prepare.readers.files import is_compressed, is_url, open_text

_Lines: TypeAlias = Iterable[tuple[int, bytes]]  # line number and line
_Text: TypeAlias = "str | tuple[ProblemKind, str]"  # a text, or the kind and reason of a problem
_NumberedTexts: TypeAlias = "Iterator[tuple[int, _Text, str]]"  # line number, text and key
_RowText: TypeAlias = "Callable[[Any], tuple[_Text, str]]"  # of a JSON object or a row: text and key
_READ_BYTES = 1 << 20
_EMPTY: tuple[ProblemKind, str] = ("empty", "empty document")


def text_parts(path: str, target_bytes: int, format: Format) -> list[Part]:
    """Cut a text file into parts of whole lines (or whole blocks), each the shortest of at least `target_bytes`.

    A compressed file is one part, and so is one in which a document may end anywhere: JSON and CSV.
    """
    if is_compressed(path) or format not in ("lines", "blocks", "jsonl"):
        return [Part(path, 0, sys.maxsize)]
    with open_text(path) as file:
        # To the end, which also tells the size of a URL.
        size = file.seek(0, 2)
        bounds = [0]
        while bounds[-1] < size:
            min_stop = bounds[-1] + target_bytes
            bounds.append(_next_boundary(file, min_stop, format == "blocks") if min_stop < size else size)
    return [Part(path, start, stop) for start, stop in pairwise(bounds)]


def _next_boundary(file: BinaryIO, min_offset: int, after_blank: bool) -> int:
    """Return the first offset >= `min_offset` where a line begins, or one that follows a blank line there."""
    # One byte earlier: if that byte ends a line, `min_offset` itself is a boundary.
    file.seek(min_offset - 1)
    line = file.readline()
    while line and after_blank:
        line = file.readline()
        text = _decode(line)
        if isinstance(text, str) and not text.strip():
            break
    return file.tell()


def read_text(
    part: Part,
    field: str,
    format: Format = "lines",
    key_field: str | None = None,
    key_optional: bool = False,
) -> Iterator[Document | Problem]:
    """Yield the documents and problems of a part of a text file, in one of `TEXT_FORMATS`.

    `field` of JSON, or column of CSV, holds the text, and `key_field` the key, which may be missing if `key_optional`.
    """
    row_text = partial(_row_text, field=field, key_field=key_field, key_optional=key_optional)
    parsers: dict[Format, Callable[[_Lines], _NumberedTexts]] = {
        "lines": _line_texts,
        "blocks": _block_texts,
        "jsonl": partial(_json_texts, row_text=row_text),
        "json": partial(_array_texts, row_text=row_text),
        "csv": partial(_csv_texts, row_text=row_text, delimiter=","),
        "tsv": partial(_csv_texts, row_text=row_text, delimiter="\t"),
    }
    with open_text(part.path) as file:
        for line, text, key in parsers[format](_lines(file, part)):
            if isinstance(text, tuple):
                yield Problem(part.path, line, *text)
            else:
                yield Document(text, part.path, line, key=key)


def _lines(file: BinaryIO, part: Part) -> _Lines:
    """Yield the lines of a part with their numbers in the file, from 1."""
    lines_before = 0
    if part.start:  # a compressed file cannot be sought in
        lines_before = _count_lines_before(file, part)
        file.seek(part.start)
    remaining = part.stop - part.start
    for number, line in enumerate(file, lines_before + 1):
        yield number, line
        remaining -= len(line)
        if remaining <= 0:
            return


# The last count of lines: (path, size, modification time) -> (offset, lines before that offset). It lets a process
# that reads the parts of a file in order count the lines of the file once in all.
_line_count_cache: dict[tuple[str, int, int], tuple[int, int]] = {}


def _count_lines_before(file: BinaryIO, part: Part) -> int:
    """Return the number of lines that end before `part`, counted from the cached offset if that is not behind it."""
    key = (part.path, 0, 0)
    if not is_url(part.path):
        status = Path(part.path).stat()
        key = (part.path, status.st_size, status.st_mtime_ns)
    offset, lines = _line_count_cache.get(key, (0, 0))
    if offset > part.start:
        offset, lines = 0, 0
    file.seek(offset)
    while offset < part.start and (block := file.read(min(_READ_BYTES, part.start - offset))):
        offset += len(block)
        lines += block.count(b"\n")
    _line_count_cache.clear()
    _line_count_cache[key] = offset, lines
    return lines


def _decode(line: bytes) -> _Text:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "unreadable", f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
    return text.removeprefix("\ufeff").rstrip("\r\n")


def _line_texts(lines: _Lines) -> _NumberedTexts:
    for number, line in lines:
        text = _decode(line)
        yield number, text if isinstance(text, tuple) or text.strip() else _EMPTY, ""


def _block_texts(lines: _Lines) -> _NumberedTexts:
    """Yield blocks of lines separated by blank lines; a block with an unreadable line is one problem."""
    start, block = 0, []
    problem: tuple[int, _Text] | None = None
    for number, line in chain(lines, [(0, b"")]):  # the blank line at the end completes the last block
        text = _decode(line)
        if isinstance(text, tuple):
            problem = problem or (number, text)
        elif text.strip():
            start = start or number
            block.append(text)
        else:
            if problem:
                yield *problem, ""
            elif block:
                yield start, "\n".join(block), ""
            start, block, problem = 0, [], None


def _json_texts(lines: _Lines, row_text: _RowText) -> _NumberedTexts:
    for number, line in lines:
        text = _decode(line)
        if isinstance(text, tuple) or not text.strip():
            yield number, text if isinstance(text, tuple) else _EMPTY, ""
        else:
            value, problem = _parse_json(text)
            yield number, *((problem, "") if problem else row_text(value))


def _array_texts(lines: _Lines, row_text: _RowText) -> _NumberedTexts:
    """Yield the items of a JSON array, numbered from 1."""
    text = _decode(b"".join(line for _, line in lines))
    values, problem = (None, text) if isinstance(text, tuple) else _parse_json(text)
    if isinstance(values, list):
        for number, value in enumerate(values, 1):
            yield number, *row_text(value)
    else:
        reason = f"a JSON {type(values).__name__}, expected an array; JSON lines are --format jsonl"
        yield 1, problem or ("invalid", reason), ""


def _parse_json(text: str) -> tuple[Any, tuple[ProblemKind, str] | None]:
    """Return the value of a JSON text, or the problem."""
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        return None, ("invalid", f"not valid JSON: {error}")


def _csv_texts(lines: _Lines, row_text: _RowText, delimiter: str) -> _NumberedTexts:
    """Yield the rows below a header, each with the number of its first line."""
    csv.field_size_limit(sys.maxsize)
    # Bytes that are no text become half surrogate pairs, which `_json_text` reports where they matter.
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
            yield number, ("invalid", f"not valid CSV: {error}"), ""
            continue
        if header is None:
            header = row
            if repeated := [name for name in header if header.count(name) > 1]:
                yield number, ("invalid", f"column {repeated[0]!r} is there {header.count(repeated[0])} times"), ""
                return
        elif not row:
            yield number, _EMPTY, ""
        elif len(row) != len(header):
            yield number, ("invalid", f"{len(row)} columns, expected {len(header)} as in the header"), ""
        else:
            yield number, *row_text(dict(zip(header, row, strict=True)))


def _row_text(row: Any, field: str, key_field: str | None, key_optional: bool) -> tuple[_Text, str]:
    """Return the text, or the problem, of a JSON object or a row, and its key."""
    text = _json_text(row, field)
    if isinstance(text, tuple) or key_field is None or (key_optional and key_field not in row):
        return text, ""
    key = row.get(key_field)
    if isinstance(key, bool) or not isinstance(key, (str, int)) or key == "":
        reason = f"field {key_field!r} is {type(key).__name__}, expected the document's id, a string or integer"
        return ("invalid", reason), ""
    return text, str(key)


def _json_text(row: Any, field: str) -> _Text:
    if not isinstance(row, dict):
        return "invalid", f"a JSON {type(row).__name__}, expected an object with the field {field!r}"
    if field not in row:
        return "invalid", f"no field {field!r}, found {', '.join(map(repr, sorted(row)[:8])) or 'none'}"
    if not isinstance(row[field], str):
        return "invalid", f"field {field!r} is {type(row[field]).__name__}, expected a string"
    try:
        # JSON can spell half of a surrogate pair by an escape, which tokenizers and files cannot hold.
        row[field].encode("utf-8")
    except UnicodeEncodeError:
        return "unreadable", f"field {field!r} is not valid Unicode"
    return row[field] if row[field].strip() else _EMPTY
