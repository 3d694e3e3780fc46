"""Documents from text and JSON lines, what they may bring along, and the problems met on the way."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, TypeVar, get_args

import numpy as np

from mmldlm.errors import DataError

Format = Literal[
    "lines",
    "blocks",
    "jsonl",
    "parquet",
    "arrow",
    "datasets",
    "predecessor",
    "predecessor-pairs",
    "predecessor-batches",
    "predecessor-dat",
    "predecessor-texts",
]
FORMATS: tuple[Format, ...] = get_args(Format)
TEXT_FORMATS: tuple[Format, ...] = ("lines", "blocks", "jsonl")
SUFFIXES: dict[str, Format] = {
    ".txt": "lines",
    ".text": "lines",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_BATCH = 512
_T = TypeVar("_T")
ProblemKind = Literal[
    "empty",
    "unreadable",
    "invalid",
    "mismatch",
    "unencodable",
    "no_latent",
    "too_short",
    "too_long",
    "unused_latent",
]


@dataclass(frozen=True)
class Part:
    """A stretch of one input that can be read by itself: bytes of a text file, rows of a table."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True)
class Document:
    """A text and where it was found. Documents of one `group` lie on one side of the split.

    What it may bring along: `tokens` [L], already tokenized ids, for which `text` may be empty; `latents` float [M, C],
    already encoded; `key`, an id of the sample.
    """

    text: str
    source: str
    line: int
    group: str = ""
    tokens: np.ndarray | None = None
    latents: np.ndarray | None = None
    key: str = ""


@dataclass(frozen=True)
class Problem:
    """Something that kept a document out of the store. `kind` is what it is counted under."""

    source: str
    line: int
    kind: ProblemKind
    reason: str

    @property
    def harmless(self) -> bool:
        """Counted and told, but no reason to stop: nothing of the user's text is lost that was asked for."""
        return self.kind in ("empty", "too_short", "unused_latent")

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    """As many at a time as tokenizers and encoders take with profit; the last may be fewer."""
    batch: list[_T] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def find_files(inputs: Sequence[str]) -> list[Path]:
    """Files named by paths, globs and folders (searched for known suffixes); sorted within each input.

    DataError where an input names nothing.
    """
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not files:
                raise DataError(f"{name}: no file in this folder ends in {', '.join(SUFFIXES)}")
        elif path.is_file():
            files = [path]
        else:
            files = sorted(file for file in map(Path, glob.glob(name, recursive=True)) if file.is_file())  # noqa: PTH207
            if not files:
                raise DataError(f"{name}: no such file; expected a text file, a folder or a glob pattern")
        found += files
    return list(dict.fromkeys(found))


def read_file(
    path: Path, format: Format | None = None, field: str = "text", key_field: str | None = None
) -> Iterator[Document | Problem]:
    """The documents of one text file, in order, and a `Problem` in the place of each that cannot be had.

    Lines end in \\n or \\r\\n alone; `format` defaults to what the suffix says, or `lines`. JSON lines have their
    document's key in `key_field`. DataError where the file cannot be opened.
    """
    chosen = format or SUFFIXES.get(path.suffix, "lines")
    for part in text_parts(path, _WHOLE, chosen):
        yield from read_text(part, field, chosen, key_field)


@dataclass(frozen=True)
class _Keyed:
    text: str
    key: str


# What becomes of lines: the line number, and either the text or (kind, reason).
_Text: TypeAlias = "str | tuple[ProblemKind, str]"
_Found: TypeAlias = "Iterator[tuple[int, _Text | _Keyed]]"
_Lines: TypeAlias = Iterable[tuple[int, bytes]]
_CHUNK, _WHOLE = 1 << 20, 1 << 60
_EMPTY: tuple[ProblemKind, str] = ("empty", "empty document")


def text_parts(path: Path | str, target_bytes: int, format: Format = "lines") -> list[Part]:
    """Stretches of whole lines, or of whole blocks, each the shortest of at least `target_bytes`."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            borders = [0]
            while borders[-1] < size:
                least = borders[-1] + target_bytes
                borders.append(_border(file, least, format == "blocks") if least < size else size)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from None
    return [Part(str(path), start, stop) for start, stop in pairwise(borders)]


def _border(file: BinaryIO, least: int, after_blank: bool) -> int:
    """The first byte from `least` on at which a line begins, and with `after_blank` one that follows a blank line."""
    file.seek(least - 1)
    line = file.readline()
    while line and after_blank:
        line = file.readline()
        text = _decode(line)
        if isinstance(text, str) and not text.strip():
            break
    return file.tell()


def read_text(
    part: Part, field: str, format: Format = "lines", key_field: str | None = None
) -> Iterator[Document | Problem]:
    """The documents of a part; DataError where its file cannot be read."""
    kinds: dict[Format, Callable[[_Lines], _Found]]
    json_texts = partial(_json_texts, field=field, key_field=key_field)
    kinds = {"lines": _line_texts, "blocks": _block_texts, "jsonl": json_texts}
    try:
        with Path(part.path).open("rb") as file:
            for line, found in kinds[format](_lines(file, part)):
                if isinstance(found, tuple):
                    yield Problem(part.path, line, *found)
                elif isinstance(found, _Keyed):
                    yield Document(found.text, part.path, line, key=found.key)
                else:
                    yield Document(found, part.path, line)
    except OSError as error:
        raise DataError(f"{part.path}: cannot read: {error.strerror}") from None


def _lines(file: BinaryIO, part: Part) -> _Lines:
    """The lines of a part with their numbers in the file, from 1."""
    before = _count_lines(file, part)
    file.seek(part.start)
    left = part.stop - part.start
    for number, line in enumerate(file, before + 1):
        yield number, line
        left -= len(line)
        if left <= 0:
            return


_counted: dict[tuple[str, int, int], tuple[int, int]] = {}  # by file as it is: a byte of it, and lines before that


def _count_lines(file: BinaryIO, part: Part) -> int:
    """How many lines end before a part; each process that reads parts in order goes through the file once for it."""
    status = Path(part.path).stat()
    key = (part.path, status.st_size, status.st_mtime_ns)
    place, lines = _counted.get(key, (0, 0))
    if place > part.start:
        place, lines = 0, 0
    file.seek(place)
    while place < part.start and (chunk := file.read(min(_CHUNK, part.start - place))):
        place += len(chunk)
        lines += chunk.count(b"\n")
    _counted.clear()
    _counted[key] = place, lines
    return lines


def _decode(line: bytes) -> _Text:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "unreadable", f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
    return text.removeprefix("\ufeff").rstrip("\r\n")


def _line_texts(lines: _Lines) -> _Found:
    for number, line in lines:
        text = _decode(line)
        yield number, text if isinstance(text, tuple) or text.strip() else _EMPTY


def _block_texts(lines: _Lines) -> _Found:
    """Blank lines separate documents; one unreadable line spoils its whole block."""
    start, block = 0, []
    problem: tuple[int, _Text] | None = None
    for number, line in chain(lines, [(0, b"")]):
        text = _decode(line)
        if isinstance(text, tuple):
            problem = problem or (number, text)
        elif text.strip():
            start = start or number
            block.append(text)
        else:
            if problem:
                yield problem
            elif block:
                yield start, "\n".join(block)
            start, block, problem = 0, [], None


def _json_texts(lines: _Lines, field: str, key_field: str | None) -> _Found:
    for number, line in lines:
        text = _decode(line)
        yield number, text if isinstance(text, tuple) else _json_row(text, field, key_field) if text.strip() else _EMPTY


def _json_row(line: str, field: str, key_field: str | None) -> _Text | _Keyed:
    text = _json_field(line, field)
    if isinstance(text, tuple) or key_field is None:
        return text
    key = json.loads(line).get(key_field)
    if isinstance(key, bool) or not isinstance(key, (str, int)) or key == "":
        return (
            "invalid",
            f"field {key_field!r} is {type(key).__name__}, expected the document's id, a string or integer",
        )
    return _Keyed(text, str(key))


def _json_field(line: str, field: str) -> _Text:
    try:
        row = json.loads(line)
    except ValueError as error:
        return "invalid", f"not valid JSON: {error}"
    if not isinstance(row, dict):
        return "invalid", f"a JSON {type(row).__name__}, expected an object with the field {field!r}"
    if field not in row:
        return "invalid", f"no field {field!r}, found {', '.join(map(repr, sorted(row)[:8])) or 'none'}"
    if not isinstance(row[field], str):
        return "invalid", f"field {field!r} is {type(row[field]).__name__}, expected a string"
    try:
        row[field].encode("utf-8")
    except UnicodeEncodeError:
        return "unreadable", f"field {field!r} holds half a surrogate pair, which is not text"
    return row[field] if row[field].strip() else _EMPTY
