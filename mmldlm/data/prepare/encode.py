"""The stage after the fit: a lot of documents becomes shards, of the tokens and latents of its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.encoders import ImportedLatents, LatentEncoder
from mmldlm.data.manifest import token_dtype
from mmldlm.data.prepare.documents import Document, Problem, batches
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.report import Problems, StageProgress
from mmldlm.data.shard_writer import SPLITS, Contents, ShardWriter
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError

SHARD_SAMPLES = 100_000
Tell = Callable[[Problem], None]


@dataclass(frozen=True)
class Piece:
    """What becomes one sample: a document, or a part of one that was too long."""

    document: Document
    split: int
    text: str
    tokens: np.ndarray


def encode_lot(
    documents: Iterable[tuple[int, Document]],
    tokenizer: Tokenizer,
    encoder: LatentEncoder,
    config: PrepareConfig,
    folder: Path,
    told: Counter[str],
    each: Callable[[], None],
    shown: StageProgress,
) -> tuple[Contents, dict[str, Any]]:
    """Fill `folder` with the shards of documents, each given with its split; `each` is called before each batch."""
    over_length = 0
    dtypes = token_dtype(tokenizer.vocab_size), np.dtype(config.latent_dtype)
    shape = encoder.latent_tokens, encoder.channels
    with (
        ShardWriter(folder, tokenizer.vocab_size, shape, *dtypes, SHARD_SAMPLES) as shards,
        Problems(config, folder, told) as problems,
    ):
        for batch in batches(documents):
            each()
            with shown.timed("tokenize"):
                pieces, count = pieces_of(batch, tokenizer, config, problems.add)
            over_length += count
            with shown.timed("encode"):
                for some in batches(pieces):  # of long documents there are many
                    _write(shards, some, encoder, problems.add)
        with shown.timed("encode"):
            return shards.finish(), {"over_length": over_length, **problems.result()}


def pieces_of(
    documents: Sequence[tuple[int, Document]], tokenizer: Tokenizer, config: PrepareConfig, tell: Tell
) -> tuple[list[Piece], int]:
    """The samples of documents with their splits, and how many of these were too long."""
    pieces, over_length = [], 0
    for (split, document), tokens in zip(documents, _tokenize(documents, tokenizer, tell), strict=True):
        if tokens is None:
            continue
        if len(tokens) < config.min_length:
            reason = f"{len(tokens)} tokens, expected at least {config.min_length}"
            tell(Problem(document.source, document.line, "too_short", reason))
        elif len(tokens) <= config.max_length:
            pieces.append(Piece(document, split, document.text, tokens))
        elif document.latents is not None and config.over_length == "split":
            reason = (
                f"{len(tokens)} tokens, but one latent, which cannot be split: expected at most --max-length "
                f"{config.max_length}, or --over-length cut"
            )
            tell(Problem(document.source, document.line, "too_long", reason))
        else:
            over_length += 1
            # Parts of equal size, so that no crumb of a few tokens is left over.
            parts = np.array_split(tokens, -(-len(tokens) // config.max_length))
            parts = [tokens[: config.max_length]] if config.over_length == "cut" else parts
            texts = tokenizer.decode_batch([part.tolist() for part in parts])
            pieces += [Piece(document, split, text, part) for text, part in zip(texts, parts, strict=True)]
    return pieces, over_length


def _tokenize(
    documents: Sequence[tuple[int, Document]], tokenizer: Tokenizer, tell: Tell
) -> Iterator[np.ndarray | None]:
    """int64 [L] of each document, its own where it has some; None, and a problem told, where there are none."""
    texts = [document for _, document in documents if document.tokens is None]
    spelled = iter(_spell(texts, tokenizer, tell))
    for _, document in documents:
        ids = next(spelled) if document.tokens is None else document.tokens
        yield None if ids is None else np.asarray(ids, np.int64)


def _spell(documents: Sequence[Document], tokenizer: Tokenizer, tell: Tell) -> list[list[int] | None]:
    """Ids of each text; None, and a problem told, where the tokenizer cannot spell one."""
    try:
        return [*tokenizer.encode_batch([document.text for document in documents])]
    except DataError as error:
        if len(documents) > 1:
            return [ids for document in documents for ids in _spell([document], tokenizer, tell)]
        tell(Problem(documents[0].source, documents[0].line, "unencodable", str(error)))
        return [None]


def _write(shards: ShardWriter, pieces: Sequence[Piece], encoder: LatentEncoder, tell: Tell) -> None:
    """All that have a latent."""
    if isinstance(encoder, ImportedLatents):
        latents = encoder.take([piece.document.latents for piece in pieces if piece.document.latents is not None])
    else:
        latents = encoder.encode([piece.text for piece in pieces])
    finite = np.isfinite(latents).all(axis=(1, 2))
    for index in np.flatnonzero(~finite).tolist():
        document, text = pieces[index].document, pieces[index].text
        reason = f"the encoder gives no latent for {text[:40]!r}"
        if isinstance(encoder, ImportedLatents):
            reason = "its latent is not finite, or of no length"
        tell(Problem(document.source, document.line, "no_latent", reason))
    for number, split in enumerate(SPLITS):
        rows = [row for row, piece in enumerate(pieces) if piece.split == number and finite[row]]
        if rows:
            kept = [pieces[row] for row in rows]
            tokens, characters = [piece.tokens for piece in kept], [len(piece.text) for piece in kept]
            shards.add(split, tokens, latents[rows], characters)
