"""Readers of text: a document per line, per block of lines, or per JSON line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from mmldlm.data.prepare.documents import Document, Format, Part, Problem, ProblemKind
from mmldlm.data.prepare.readers.files import is_url, open_input
from mmldlm.errors import DataError

_Lines: TypeAlias = Iterable[tuple[int, bytes]]  # line number and line
_Text: TypeAlias = "str | tuple[ProblemKind, str]"  # a text, or the kind and reason of a problem
_NumberedTexts: TypeAlias = "Iterator[tuple[int, _Text, str]]"  # line number, text and key
_READ_BYTES = 1 << 20
_EMPTY: tuple[ProblemKind, str] = ("empty", "empty document")


def text_parts(path: str, target_bytes: int, format: Format) -> list[Part]:
    """Cut a text file into parts of whole lines (or whole blocks), each the shortest of at least `target_bytes`.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        with open_input(path) as file:
            # To the end, which also tells the size of a URL.
            size = file.seek(0, 2)
            bounds = [0]
            while bounds[-1] < size:
                min_stop = bounds[-1] + target_bytes
                bounds.append(_next_boundary(file, min_stop, format == "blocks") if min_stop < size else size)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from None
    return [Part(path, start, stop) for start, stop in pairwise(bounds)]


def _next_boundary(file: BinaryIO, min_offset: int, after_blank: bool) -> int:
    """Return the first offset >= `min_offset` where a line begins.

    With `after_blank`, it is the first after a blank line that itself begins at or after `min_offset`.
    """
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
    """Yield the documents and problems of a part of a text file.

    Args:
        field: Field of JSON lines that holds the text.
        format: One of `TEXT_FORMATS`.
        key_field: Field of JSON lines that holds the document's key.
        key_optional: Accept JSON lines without it.

    Raises:
        DataError: The file cannot be read.
    """
    json_texts = partial(_json_texts, field=field, key_field=key_field, key_optional=key_optional)
    parsers: dict[Format, Callable[[_Lines], _NumberedTexts]]
    parsers = {"lines": _line_texts, "blocks": _block_texts, "jsonl": json_texts}
    try:
        with open_input(part.path) as file:
            for line, text, key in parsers[format](_lines(file, part)):
                if isinstance(text, tuple):
                    yield Problem(part.path, line, *text)
                else:
                    yield Document(text, part.path, line, key=key)
    except OSError as error:
        raise DataError(f"{part.path}: cannot read: {error.strerror}") from None


def _lines(file: BinaryIO, part: Part) -> _Lines:
    """Yield the lines of a part with their numbers in the file, from 1."""
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


def _json_texts(lines: _Lines, field: str, key_field: str | None, key_optional: bool) -> _NumberedTexts:
    for number, line in lines:
        text, key = _decode(line), ""
        if isinstance(text, str):
            text, key = _json_row(text, field, key_field, key_optional) if text.strip() else (_EMPTY, "")
        yield number, text, key


def _json_row(line: str, field: str, key_field: str | None, key_optional: bool) -> tuple[_Text, str]:
    """Return the text, or the problem, of a JSON line, and its key."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return ("invalid", f"not valid JSON: {error}"), ""
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
        return "unreadable", f"field {field!r} holds half a surrogate pair, which is not text"
    return row[field] if row[field].strip() else _EMPTY
