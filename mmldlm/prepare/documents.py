"""`Document` and `Problem`, which every reader yields, and the names of the formats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np

Format = Literal["lines", "blocks", "jsonl", "json", "csv", "tsv", "parquet", "arrow", "datasets"]
FORMATS: tuple[Format, ...] = get_args(Format)
TEXT_FORMATS: tuple[Format, ...] = ("lines", "blocks", "jsonl", "json", "csv", "tsv")
SUFFIXES: dict[str, Format] = {
    ".txt": "lines",
    ".text": "lines",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_T = TypeVar("_T")
ProblemKind = Literal[
    "empty", "unreadable", "invalid", "mismatch", "unencodable", "no_latent", "too_short", "too_long", "unused_latent"
]


@dataclass(frozen=True)
class Part:
    """A range of one input that can be read independently of the rest.

    `start` and `stop` (exclusive) are byte offsets in a text file, or indices of row groups or record batches in a
    table.
    """

    path: str
    start: int
    stop: int
    first_line: int = 1  # number of the line or row at `start`


@dataclass(frozen=True)
class Columns:
    """Names of columns, or fields, other than the text. A name is None if the input has no such column."""

    tokens: str | None = None
    latents: str | None = None
    key: str | None = None
    prefix: str | None = None
    group: str | None = None
    weight: str | None = None


@dataclass(frozen=True)
class Document:
    """An input text with its location: `line` (or row) of the file `source`, counted from 1.

    The optional attributes come from the input:

    Attributes:
        tokens: Ids [L] of a text that is tokenized already. `text` may then be empty.
        latents: Float [M, C] of a text that is encoded already.
        key: The id of the document.
        prefix: A condition that is never masked, for example the question that the text answers.
        group: Documents of the same group share a split.
        weight: The weight of its loss in training, relative to other documents.
    """

    text: str
    source: str
    line: int
    tokens: np.ndarray | None = None
    latents: np.ndarray | None = None
    key: str = ""
    prefix: str = ""
    group: str = ""
    weight: float = 1.0

    def problem(self, kind: ProblemKind, reason: str) -> Problem:
        """Return the reason why this document is not in the store."""
        return Problem(self.source, self.line, kind, reason)


@dataclass(frozen=True)
class Problem:
    """The reason why a document is not in the store. Problems are counted by `kind`."""

    source: str
    line: int
    kind: ProblemKind
    reason: str

    @property
    def harmless(self) -> bool:
        """True if the problem is counted and reported but never stops the preparation, as no requested text is lost."""
        return self.kind in ("empty", "too_short", "unused_latent")

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


def to_weight(value: Any) -> float | None:
    """Return a number, or its text in a table of text, as a weight, or None if it is negative or no finite float32."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and 0 <= float(value) <= float(np.finfo(np.float32).max):
            return float(value)
    return None


DocumentStream: TypeAlias = Iterator[Document | Problem]
# One task reads a chunk: parts of inputs, each with its format, or the name of an embedded corpus without a format.
Chunk: TypeAlias = tuple[tuple[str, Part], ...]


def batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    """Yield lists of 512 items, a batch size that suits tokenizers and encoders. The last may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, 512)):
        yield batch
