"""What a preparation is to do: its options, its sources, and how these are cut into lots.

A **lot** is what one process prepares at a time: a part of a large input, or several small inputs. It is cut by size
alone, so that it does not depend on who prepares it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmldlm import __version__
from mmldlm.data.prepare.documents import Document, Format, Part, Problem
from mmldlm.data.prepare.inputs import described, find_inputs, reader
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.readers import python_docs


class LotPart(NamedTuple):
    """A part of an input and its format; "" for an embedded corpus, which is one part, and its path the name."""

    format: Format | str
    part: Part


Lot = tuple[LotPart, ...]


@dataclass(frozen=True)
class Plan:
    """`options` are those that are recorded in a store, `sources` all that it is made of, with their hashes."""

    version: str
    options: dict[str, Any]
    sources: list[dict[str, Any]]
    lots: list[Lot]

    @property
    def identity(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        lots = [[[format, asdict(part)] for format, part in lot] for lot in self.lots]
        found = {"version": self.version, "options": self.options, "sources": self.sources, "lots": lots}
        return json.dumps(found, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        found = json.loads(text)
        lots = [tuple(LotPart(format, Part(**part)) for format, part in lot) for lot in found.pop("lots")]
        return cls(**found, lots=lots)


def make_plan(config: PrepareConfig) -> Plan:
    """DataError where an input cannot be read. All of each is read once, for its hash."""
    options = json.loads(json.dumps(config.recorded()))
    if config.corpus:
        return Plan(
            __version__, options, python_docs.sources(config.corpus), [(LotPart("", Part(config.corpus, 0, 0)),)]
        )
    inputs = find_inputs(config)
    sources = described(inputs, config)
    return Plan(__version__, options, sources, list(_lots(inputs, sources, config)))


def _lots(
    inputs: Sequence[tuple[Path, Format]], sources: Sequence[dict[str, Any]], config: PrepareConfig
) -> Iterator[Lot]:
    """Parts of about `config.part_bytes`; smaller ones together. `sources` begin with the inputs."""
    lot: list[LotPart] = []
    held = 0.0
    for (path, format), source in zip(inputs, sources[: len(inputs)], strict=True):
        parts = reader(format, config).parts(path, config.part_bytes)
        for part in parts:
            size = source["bytes"] / len(parts)
            if lot and held + size > config.part_bytes:
                yield tuple(lot)
                lot, held = [], 0.0
            lot.append(LotPart(format, part))
            held += size
    if lot:
        yield tuple(lot)


def read_lot(lot: Lot, config: PrepareConfig) -> Iterator[Document | Problem]:
    """The documents of a lot, in order, as the input has them."""
    for format, part in lot:
        if format:
            yield from reader(format, config).read(part, config.field)  # type: ignore[arg-type]
        else:
            yield from python_docs.read_corpus(part.path)
