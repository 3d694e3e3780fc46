"""Stage `fit`, one task for all chunks: check imported latents, find duplicates, fit the tokenizer and the encoder.

Both are fitted to the training split only. If that is large, they see a sample of it (`--fit-documents`), which bounds
memory.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.encoders import (
    ChunkedEncoder,
    ImportedLatents,
    LatentEncoder,
    LearnedEncoder,
    LsaEncoder,
    SentenceTransformerEncoder,
    load_encoder,
)
from mmldlm.data.manifest import SPLITS
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError
from mmldlm.prepare.corpus import SPLITS_FOLDER, TRAIN, USES_FILE, Corpus, cached_documents
from mmldlm.prepare.documents import Problem, batches
from mmldlm.prepare.encode import make_samples
from mmldlm.prepare.job import Job
from mmldlm.prepare.options import PrepareConfig
from mmldlm.prepare.readers.latents import LatentFile
from mmldlm.prepare.report import ProblemLog, StageProgress, check_losses, check_problem_budget

_Misfit = tuple[int, int | None, Problem]  # chunk, index of the document in it, problem


def fit(job: Job, chunk: int, folder: Path, progress: StageProgress) -> dict[str, Any]:
    """Fit tokenizer and encoder to the training documents of all chunks, and save them in `folder`.

    Returns:
        Statistics of the grouping, and problems.

    Raises:
        DataError: There are more problems than the options allow, or a split has no documents.
    """
    config, latents = job.config, job.latents
    (folder / SPLITS_FOLDER).mkdir()
    corpus = Corpus([job.path("read", chunk) for chunk in job.chunks], folder / SPLITS_FOLDER)
    # Unusable documents are excluded first: they must not decide on groups, tokenizer or encoder.
    with ProblemLog(config, folder, progress.reported) as problems:
        unusable: dict[int, list[int]] = {}
        # A file of latents has one shape. Only included latents can differ.
        misfits = _find_unpaired(job, latents) if latents and not latents.by_position else _find_misshapen(job)
        for number, index, problem in misfits:
            problems.add(problem)
            if index is not None:
                unusable.setdefault(number, []).append(index)
        for number, indices in unusable.items():
            corpus.exclude(number, indices)
    check_problem_budget(config, [*job.results("read"), problems.result()])
    num_documents = sum(corpus.split_sizes().values())
    if not num_documents:
        raise DataError(f"{config.corpus or ', '.join(config.inputs)}: no documents; expected text")
    progress.phase("grouping duplicates")
    grouping = corpus.group_statistics()
    if config.near_duplicates or config.corpus is not None:
        grouping |= corpus.split_near_duplicates(config)
    for split, size in corpus.split_sizes().items():
        if not size:
            raise DataError(
                f"split {split} has no documents of {num_documents} in {grouping['groups']} groups; "
                "expected more documents or a larger fraction"
            )
    progress.phase("fitting the tokenizer")
    tokenizer = _fit_tokenizer(config, corpus)
    tokenizer.save(folder / "tokenizer")
    progress.phase("fitting the encoder")
    # A long document has several samples, so apply the limit again, to samples.
    texts = islice(_training_texts(corpus, tokenizer, config), config.fit_documents)
    documents = (item for number in job.chunks for item in corpus.documents(number))
    validation = (document.text for split, document in documents if SPLITS[split] == "validation")
    encoder = _fit_encoder(job, texts, validation, tokenizer, progress)
    encoder.save(folder / "encoder")
    return {"grouping": grouping, **problems.result()}


def _fit_encoder(
    job: Job, texts: Iterable[str], held_out: Iterable[str], tokenizer: Tokenizer, progress: StageProgress
) -> LatentEncoder:
    """Return the encoder of the options: fitted, pretrained, or a placeholder for imported latents."""
    config, latents = job.config, job.latents
    kind = config.encoder.partition(":")[0]
    if config.imports_latents:
        # Included latents are part of the inputs, so the inputs' hashes identify them, unless the user names a version.
        digest = hashlib.sha256(json.dumps(job.plan.sources, sort_keys=True).encode()).hexdigest()
        revision = config.encoder_version or (latents.revision if latents else digest)
        shape = latents.shape if latents else _first_latent_shape(job.results("read"))
        assert shape is not None, "a document without latents"
        return ImportedLatents(config.latents_of or kind, revision, shape, config.channels, config.normalise)
    if config.encoder_folder is not None:
        return load_encoder(config.encoder_folder, batch_size=config.encoder_batch_size, device=config.encoder_device)
    if kind == "learned":
        shape = config.latent_tokens or 4, config.channels or 64
        width, steps = config.encoder_width or 128, config.encoder_steps or 1000
        teacher = _sentence_encoder(config, config.teacher) if config.teacher else None
        return LearnedEncoder.fit(texts, tokenizer, shape, width, steps, config.seed, progress, held_out, teacher)
    encoder: LatentEncoder
    if kind == "lsa":
        encoder = LsaEncoder.fit(texts, config.channels, config.seed)
    else:
        encoder = _sentence_encoder(config, config.encoder, config.channels)
    return ChunkedEncoder(encoder, config.latent_tokens) if config.latent_tokens else encoder


def _sentence_encoder(config: PrepareConfig, model: str, channels: int | None = None) -> SentenceTransformerEncoder:
    """Load the sentence-transformers model of `--encoder` or `--teacher`."""
    options = config.prompt, config.normalise, config.prompt_name, config.encoder_revision
    use = config.encoder_batch_size, config.encoder_device
    return SentenceTransformerEncoder(model.partition(":")[2], channels, *options, *use)


def _fit_tokenizer(config: PrepareConfig, corpus: Corpus) -> Tokenizer:
    """Return the tokenizer of `config`: trained on `corpus`, built in, or loaded from a path."""
    if config.tokenizer in ("bpe", "words"):
        documents = corpus.training_sample(config.fit_documents)
        texts = (text for document in documents for text in (document.prefix, document.text) if text)
        train = Tokenizer.train if config.tokenizer == "bpe" else Tokenizer.words
        return train(texts, config.vocab_size)
    return Tokenizer.characters() if config.tokenizer == "characters" else Tokenizer.load(config.tokenizer)


def _training_texts(corpus: Corpus, tokenizer: Tokenizer, config: PrepareConfig) -> Iterator[str]:
    """Yield the texts of the training samples. A document that is too long has several samples."""
    problems: list[Problem] = []
    has_samples, counts = False, Counter[str]()
    documents = corpus.training_sample(config.fit_documents)
    for batch in batches((TRAIN, document) for document in documents):
        samples, batch_counts = make_samples(batch, tokenizer, config, problems.append)
        counts.update(batch_counts)
        has_samples = has_samples or bool(samples)
        yield from (sample.text for sample in samples)
        # The stage `encode` makes the same samples again, and reports their problems.
        serious = [problem for problem in problems if not problem.harmless]
        if config.on_problem == "error":  # else they count when all documents are encoded
            check_problem_budget(config, [{"serious": len(serious), "first": str(*serious[:1])}])
        problems.clear()
    check_losses(config, counts)  # before the hours that encoding may take
    if not has_samples:
        raise DataError("split train has no samples; expected documents of at least --min-length tokens")


def _first_latent_shape(results: list[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the shape [M, C] of the first imported latents of all chunks, None if there are none."""
    return next((tuple(shape) for result in results for shape in result["shapes"]), None)


def _find_misshapen(job: Job) -> Iterator[_Misfit]:
    """Yield documents whose latents have another shape than the latents of the first document."""
    results = job.results("read")
    shape = _first_latent_shape(results)
    for chunk, result in enumerate(results):
        if all(tuple(other) == shape for other in result["shapes"]):
            continue
        for index, document in enumerate(cached_documents(job.path("read", chunk))):
            if document.latents is not None and shape is not None and document.latents.shape != shape:
                latents = list(document.latents.shape)
                reason = f"sample {document.key}: latents {latents}, expected {list(shape)} like the first sample"
                yield chunk, index, document.problem("mismatch", reason)


def _find_unpaired(job: Job, latents: LatentFile) -> Iterator[_Misfit]:
    """Yield documents whose latent belongs to an earlier document, then the latents without a document."""
    owners = np.full((len(latents.rows), 2), -1, np.int64)  # by row: chunk and index of the first document
    for chunk in job.chunks:
        for row, index in np.load(job.path("read", chunk) / USES_FILE, allow_pickle=False).tolist():
            if owners[row, 0] < 0:
                owners[row] = chunk, index
            # A problem (-1) has been reported already and is in no store, like every other use of its row.
            elif index >= 0:
                owner_chunk, owner_index = owners[row].tolist()
                (owner,) = cached_documents(job.path("read", owner_chunk), [owner_index])
                (document,) = cached_documents(job.path("read", chunk), [index])
                reason = f"id {document.key!r} is already used by {owner.source}:{owner.line}"
                yield chunk, index, document.problem("mismatch", reason)
    for key, row in latents.rows.items():
        if owners[row, 0] < 0:
            problem = Problem(str(latents.path), row + 1, "unused_latent", f"id {key!r} belongs to no document")
            yield len(job.chunks), None, problem
