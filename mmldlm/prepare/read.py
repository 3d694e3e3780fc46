"""Stages `count` and `read`: count a chunk's documents, and cache them with text, latents, split and group."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.prepare.corpus import USES_FILE, DocumentCacheWriter
from mmldlm.prepare.documents import Chunk, Document, DocumentStream, Problem
from mmldlm.prepare.inputs import read_part
from mmldlm.prepare.job import Job
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.readers import python_docs
from mmldlm.prepare.readers.latents import LatentFile
from mmldlm.prepare.report import DOCUMENTS, ProblemLog, StageProgress

_MAX_WORD = 1_000_000  # characters: tokenizers take seconds for such a word, and far longer for a longer one


def count_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Count the documents and problems of a chunk."""
    documents = chunk_documents(job.plan.chunks[chunk], job.config, progress.track)
    return {"count": sum(1 for _ in progress.track(documents, DOCUMENTS))}


def read_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Read a chunk into a document cache in `folder`, with the splits and groups of its documents.

    Returns:
        The shapes of imported latents, the number of documents from each package of an embedded corpus, and problems.
    """
    config, latents = job.config, job.latents
    uses = array("q")
    shapes: dict[tuple[int, ...], None] = {}  # a set in the order of insertion
    origins: Counter[str] = Counter()
    first_position = 0
    if latents and latents.by_position:
        counts = [result["count"] for result in job.results("count")]
        if sum(counts) != len(latents.rows):
            raise DataError(
                f"{latents.path}: {len(latents.rows)} latents, expected {sum(counts)}, one for each document found"
            )
        first_position = sum(counts[:chunk])
    with DocumentCacheWriter(folder, config) as cache, ProblemLog(config, folder, progress.reported) as problems:
        documents = chunk_documents(job.plan.chunks[chunk], config, progress.track)
        items = complete_documents(documents, config, latents, first_position)
        for item, row in progress.track(items, DOCUMENTS):
            if isinstance(item, Document) and len(item.text) > _MAX_WORD < max(map(len, item.text.split())):
                item = item.problem("invalid", f"a word of over {_MAX_WORD:,} characters, expected white space")
            # Record problems that refer to a row too, or the row would count as unused.
            if row is not None:
                uses.extend((row, -1 if isinstance(item, Problem) else len(cache)))
            if isinstance(item, Problem):
                problems.add(item)
                continue
            cache.add(item)
            if item.latents is not None:
                shapes.setdefault(item.latents.shape)
            if config.corpus:
                origins[item.source.split("/")[0]] += 1
        result = {"shapes": list(shapes), "origins": origins, **problems.result()}
    if latents:
        np.save(folder / USES_FILE, np.frombuffer(uses, np.int64).reshape(-1, 2), allow_pickle=False)
    return result


def chunk_documents(
    chunk: Chunk, config: PrepareConfig, track: Callable[[Iterable[Document], str], Iterable[Document]]
) -> DocumentStream:
    """Yield the documents and problems of a chunk in the order of the input.

    `track` reports the progress of an embedded corpus, which is mostly read before its first document.
    """
    for format, part in chunk:
        if format:
            yield from read_part(format, part, config)  # type: ignore[arg-type]
        else:
            yield from python_docs.read_corpus(part.path, track)


def complete_documents(
    documents: DocumentStream, config: PrepareConfig, latents: LatentFile | None = None, first_position: int = 0
) -> Iterator[tuple[Document | Problem, int | None]]:
    """Yield each document with the text and latents that `config` requires, or its problem, and its row in `latents`.

    `first_position` is the chunk's first document in the whole input. Without `latents` the row is None.
    """
    if config.tokens_field is not None:
        documents = _decode_tokens(documents, Tokenizer.load(config.tokenizer))
    if latents:
        yield from latents.attach(documents, first_position)
        return
    for item in documents:
        if isinstance(item, Document) and item.latents is None and config.imports_latents:
            item = item.problem("no_latent", "has no latent, which --encoder included requires")
        yield item, None


def _decode_tokens(documents: DocumentStream, tokenizer: Tokenizer) -> DocumentStream:
    """Decode the tokens of documents without text. Tokens that cannot come from a text are a problem."""
    for item in documents:
        if isinstance(item, Problem) or item.tokens is None:
            yield item
            continue
        invalid = (item.tokens < 0) | (item.tokens >= tokenizer.vocab_size)
        invalid |= (item.tokens == tokenizer.mask_id) | (item.tokens == tokenizer.pad_id)
        if invalid.any():
            position = int(np.argmax(invalid))
            token = int(item.tokens[position])
            named = {tokenizer.mask_id: "[MASK]", tokenizer.pad_id: "[PAD]"}
            fault = named.get(token, f"not below {tokenizer.vocab_size}")
            reason = f"sample {item.key}: token {position} is {token}, {fault}; expected ids of text from --tokenizer"
            yield item.problem("mismatch", reason)
        elif item.text:
            yield item
        elif (text := tokenizer.decode_batch([item.tokens.tolist()])[0]).strip():
            yield replace(item, text=text)
        else:
            yield item.problem("empty", "its tokens decode to no text")
