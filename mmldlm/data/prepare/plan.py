"""The plan of a preparation: its options, its sources, and the chunks that these are cut into.

A **chunk** is what one task reads: a part of a large input, or several small inputs. Chunks depend only on the sizes
of the inputs and on `--part-bytes`, not on the number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mmldlm import __version__
from mmldlm.data.prepare.documents import Document, Format, Part, Problem, Track, no_tracking
from mmldlm.data.prepare.inputs import describe_sources, find_inputs, get_reader
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.readers import python_docs


class ChunkPart(NamedTuple):
    """A part of an input with its format; "" for an embedded corpus, whose name is the path."""

    format: Format | str
    part: Part


Chunk = tuple[ChunkPart, ...]


@dataclass(frozen=True)
class Plan:
    """A preparation of `chunks` with the `options` that its store records.

    `sources` describes all inputs with their hashes, as in the store's manifest.
    """

    version: str
    options: dict[str, Any]
    sources: list[dict[str, Any]]
    chunks: list[Chunk]

    def to_json(self) -> str:
        """Return the contents of `plan.json`."""
        chunks = [[[format, asdict(part)] for format, part in chunk] for chunk in self.chunks]
        values = {"version": self.version, "options": self.options, "sources": self.sources, "chunks": chunks}
        return json.dumps(values, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote."""
        values = json.loads(text)
        chunks = [tuple(ChunkPart(format, Part(**part)) for format, part in chunk) for chunk in values.pop("chunks")]
        return cls(**values, chunks=chunks)


def make_plan(config: PrepareConfig) -> Plan:
    """Find the inputs of `config`, hash them and cut them into chunks."""
    # As they are read back from `plan.json` and manifests, with which they are compared: tuples become lists.
    options = json.loads(json.dumps(config.recorded()))
    if config.corpus:
        chunk = (ChunkPart("", Part(config.corpus, 0, 0)),)
        return Plan(__version__, options, python_docs.sources(config.corpus) + describe_sources([], config), [chunk])
    inputs = find_inputs(config)
    sources = describe_sources(inputs, config)
    return Plan(__version__, options, sources, list(_make_chunks(inputs, sources, config)))


def _make_chunks(
    inputs: Sequence[tuple[str, Format]], sources: Sequence[dict[str, Any]], config: PrepareConfig
) -> Iterator[Chunk]:
    """Yield chunks of about `config.part_bytes`; latents may follow the inputs in `sources`."""
    chunk: list[ChunkPart] = []
    chunk_bytes = 0.0
    for (path, format), source in zip(inputs, sources[: len(inputs)], strict=True):
        parts = get_reader(format, config).parts(path, config.part_bytes)
        for part in parts:
            # An estimate, as rows of tables are no byte ranges; it follows from the inputs alone, as chunks must.
            part_bytes = source["bytes"] / len(parts)
            if chunk and chunk_bytes + part_bytes > config.part_bytes:
                yield tuple(chunk)
                chunk, chunk_bytes = [], 0.0
            chunk.append(ChunkPart(format, part))
            chunk_bytes += part_bytes
    if chunk:
        yield tuple(chunk)


def chunk_documents(chunk: Chunk, config: PrepareConfig, track: Track = no_tracking) -> Iterator[Document | Problem]:
    """Yield the documents and problems of a chunk in the order of the input.

    `track` reports the progress of an embedded corpus, most of which is read before its first document.
    """
    for format, part in chunk:
        if format:
            yield from get_reader(format, config).read(part, config.field)  # type: ignore[arg-type]
        else:
            yield from python_docs.read_corpus(part.path, track)
