"""Stage `encode`: write the tokens and latents of a chunk's documents to shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mmldlm.data.encoders import ImportedLatents, LatentEncoder
from mmldlm.data.manifest import SPLITS, token_dtype
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import ShardWriter
from mmldlm.errors import DataError
from mmldlm.prepare.corpus import SPLITS_FOLDER, Corpus
from mmldlm.prepare.documents import Document, Problem, batches
from mmldlm.prepare.job import Job
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.report import DOCUMENTS, ProblemLog, StageProgress

SHARD_SAMPLES = 100_000
ReportProblem: TypeAlias = Callable[[Problem], None]


@dataclass(frozen=True)
class TokenizedSample:
    """A sample before it is encoded: a document, or a part of a document that was too long.

    `tokens` is int64 [L]. It includes the prefix, which `text` does not.
    """

    document: Document
    split: int
    text: str
    tokens: np.ndarray


def encode_chunk(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Tokenize and encode a chunk's documents into shards in `folder`, and return contents, problems and counts."""
    config, tokenizer, encoder = job.config, job.tokenizer, job.encoder
    corpus = Corpus([job.path("read", chunk) for chunk in job.chunks], job.path("fit") / SPLITS_FOLDER)
    documents = progress.track(corpus.documents(chunk), DOCUMENTS, corpus.num_documents(chunk))
    counts: Counter[str] = Counter()
    dtypes = token_dtype(tokenizer.vocab_size), np.dtype(config.latent_dtype)
    shape = encoder.latent_tokens, encoder.channels
    with (
        ShardWriter(folder, tokenizer.vocab_size, shape, *dtypes, SHARD_SAMPLES, bool(config.weight_field)) as shards,
        ProblemLog(config, folder, progress.reported) as problems,
    ):
        for batch in batches(documents):
            samples, batch_counts = make_samples(batch, tokenizer, config, problems.add)
            counts.update(batch_counts)
            for sample_batch in batches(samples):  # a batch of long documents has many samples
                counts["cut"] += encoder.count_cut([sample.text for sample in sample_batch])
                _write_samples(shards, sample_batch, encoder, problems.add)
        return {"counts": counts, "contents": shards.finish().save(folder), **problems.result()}


def make_samples(
    documents: Sequence[tuple[int, Document]], tokenizer: Tokenizer, config: PrepareConfig, report: ReportProblem
) -> tuple[list[TokenizedSample], Counter[str]]:
    """Tokenize documents (given with the index of their split), and split or truncate documents that are too long.

    Documents that yield no sample are passed to `report` as problems.

    Returns:
        The samples in the order of the documents, and the counts of `Tokenizer.count_losses` with the number of
        documents that were too long (`over_length`).
    """
    new_ids = iter(_encode_texts([document for _, document in documents if document.tokens is None], tokenizer, report))
    encoded = [
        (split, document, next(new_ids) if document.tokens is None else document.tokens.tolist())
        for split, document in documents
    ]
    tokenized = [(split, document, ids) for split, document, ids in encoded if ids is not None]
    counts = tokenizer.count_losses([document.text for _, document, _ in tokenized], [ids for *_, ids in tokenized])
    with_prefix = [replace(document, text=document.prefix) for _, document, _ in tokenized if document.prefix]
    prefixes = iter(_encode_texts(with_prefix, tokenizer, report))
    samples = []
    for split, document, ids in tokenized:
        prefix = next(prefixes) if document.prefix else []
        if prefix is None:
            continue
        head = np.array([*prefix, tokenizer.pad_id] if document.prefix else [], np.int64)
        tokens, room = np.asarray(ids, np.int64), config.max_length - len(head)
        if len(tokens) < config.min_length:
            reason = f"{len(tokens)} tokens, expected at least {config.min_length}"
            report(document.problem("too_short", reason))
        elif room < config.min_length:
            reason = f"a prefix of {len(prefix)} tokens leaves no room for a text in --max-length {config.max_length}"
            report(document.problem("too_long", reason))
        elif len(tokens) <= room:
            samples.append(TokenizedSample(document, split, document.text, np.concatenate([head, tokens])))
        elif document.latents is not None and config.over_length == "split":
            reason = (
                f"{len(tokens)} tokens, but one latent, which cannot be split: expected at most {room} by --max-length "
                f"{config.max_length}, or --over-length cut"
            )
            report(document.problem("too_long", reason))
        else:
            counts["over_length"] += 1
            # Parts of equal size, so that the last one does not have just a few tokens.
            parts = np.array_split(tokens, -(-len(tokens) // room))
            parts = [tokens[:room]] if config.over_length == "cut" else parts
            # A part gets the latent of its own text, and its characters are counted there.
            texts = tokenizer.decode_batch([part.tolist() for part in parts])
            samples += [
                TokenizedSample(document, split, text, np.concatenate([head, part]))
                for text, part in zip(texts, parts, strict=True)
            ]
    return samples, counts


def _encode_texts(documents: Sequence[Document], tokenizer: Tokenizer, report: ReportProblem) -> list[list[int] | None]:
    """Return the ids of each text, or report it and return None if the tokenizer cannot encode it."""
    encoded = tokenizer.encode_each([document.text for document in documents])
    for document, ids in zip(documents, encoded, strict=True):
        if isinstance(ids, DataError):
            report(document.problem("unencodable", str(ids)))
    return [None if isinstance(ids, DataError) else ids for ids in encoded]


def _write_samples(
    shards: ShardWriter, samples: Sequence[TokenizedSample], encoder: LatentEncoder, report: ReportProblem
) -> None:
    """Write the samples with finite latents, and report the others."""
    if is_imported := isinstance(encoder, ImportedLatents):
        # `complete_documents` drops documents without latents, so rows match `samples`.
        latents = encoder.convert(
            [sample.document.latents for sample in samples if sample.document.latents is not None]
        )
    else:
        latents = encoder.encode([sample.text for sample in samples])
    finite = np.isfinite(latents).all(axis=(1, 2))
    for index in np.flatnonzero(~finite).tolist():
        reason = f"the encoder gives no latent for {samples[index].text[:40]!r}"
        reason = "its latent is not finite or has norm zero" if is_imported else reason
        report(samples[index].document.problem("no_latent", reason))
    for split_index, split in enumerate(SPLITS):
        rows = [row for row, sample in enumerate(samples) if sample.split == split_index and finite[row]]
        if rows:
            in_split = [samples[row] for row in rows]
            tokens, characters = [sample.tokens for sample in in_split], [len(sample.text) for sample in in_split]
            shards.add(split, tokens, latents[rows], characters, [sample.document.weight for sample in in_split])
