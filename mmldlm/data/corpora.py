"""Documents from text files, JSON lines and the embedded corpus, and the problems met on the way."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

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
SUFFIXES: dict[str, Format] = {
    ".txt": "lines",
    ".text": "lines",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
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

    What it may bring along: `tokens` [L], already tokenised ids, for which `text` may be empty; `latents` float [M, C],
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
    reader = {
        "lines": _read_lines,
        "blocks": _read_blocks,
        "jsonl": lambda lines: _read_jsonl(lines, field, key_field),
    }[chosen]
    try:
        with path.open("rb") as file:
            for line, found in reader(enumerate(file, start=1)):
                if isinstance(found, tuple):
                    yield Problem(str(path), line, *found)
                elif isinstance(found, _Keyed):
                    yield Document(found.text, str(path), line, key=found.key)
                else:
                    yield Document(found, str(path), line)
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from None


@dataclass(frozen=True)
class _Keyed:
    text: str
    key: str


# A reader yields the line number and either the text or (kind, reason).
_Text: TypeAlias = "str | tuple[ProblemKind, str]"
_Found: TypeAlias = "Iterator[tuple[int, _Text | _Keyed]]"
_EMPTY: tuple[ProblemKind, str] = ("empty", "empty document")


def _decode(line: bytes) -> _Text:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return "unreadable", f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8"
    return text.removeprefix("\ufeff").rstrip("\r\n")


def _read_lines(lines: Iterable[tuple[int, bytes]]) -> _Found:
    for number, line in lines:
        text = _decode(line)
        yield number, text if isinstance(text, tuple) or text.strip() else _EMPTY


def _read_blocks(lines: Iterable[tuple[int, bytes]]) -> _Found:
    """Blank lines separate documents; one unreadable line spoils its whole block."""
    start, block = 0, []
    problem: tuple[int, _Text] | None = None
    for number, line in (*lines, (0, b"")):
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


def _read_jsonl(lines: Iterable[tuple[int, bytes]], field: str, key_field: str | None) -> _Found:
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
