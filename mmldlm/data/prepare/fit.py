"""The stage between reading and encoding, of one process: splits are counted, tokenizer and encoder are fitted.

They see the training split only, and of a large one a sample (`--fit-documents`), so that memory is bounded.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mmldlm.data.encoders import (
    ChunkedEncoder,
    ImportedLatents,
    LatentEncoder,
    LsaEncoder,
    SentenceTransformerEncoder,
    load_encoder,
)
from mmldlm.data.prepare.documents import Problem, batches
from mmldlm.data.prepare.encode import pieces_of
from mmldlm.data.prepare.inputs import latent_file
from mmldlm.data.prepare.latent_pairing import given_shape, left_out
from mmldlm.data.prepare.options import PrepareConfig
from mmldlm.data.prepare.read import TRAIN, Corpus
from mmldlm.data.prepare.readers.latents import LatentFile
from mmldlm.data.prepare.report import Problems, StageProgress, settle
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import DataError

DECIDED = "splits"  # folder, in that of the fit, of the splits of lots that could not be settled by the lot alone


def fit(
    config: PrepareConfig,
    sources: Sequence[dict[str, Any]],
    folders: Sequence[Path],
    results: Sequence[dict[str, Any]],
    folder: Path,
    told: Counter[str],
    shown: StageProgress,
) -> dict[str, Any]:
    """Tokenizer and encoder to `folder`, of the lots that were spooled to `folders` with `results`: the grouping.

    DataError where there are problems that are not to be skipped, or a split without documents.
    """
    (folder / DECIDED).mkdir()
    corpus, latents = Corpus(folders, folder / DECIDED), latent_file(config)
    with Problems(config, folder, told) as problems:
        for lot, numbers in left_out(latents, folders, results, problems.add).items():
            corpus.leave_out(lot, numbers)
    settle(config, [*results, problems.result()])
    documents = sum(corpus.split_sizes().values())
    if not documents:
        raise DataError(f"{config.corpus or ', '.join(config.inputs)}: no documents; expected text")
    shown.phase("grouping duplicates")
    near = config.near_duplicates or config.corpus is not None
    grouping = corpus.decide_near_duplicates(config) if near else corpus.exact_grouping()
    for split, size in corpus.split_sizes().items():
        if not size:
            raise DataError(
                f"split {split} has no documents of {documents} in {grouping['groups']} groups; "
                "expected more documents or a larger fraction"
            )
    shown.phase("fitting the tokenizer")
    tokenizer = _tokenizer(config, corpus)
    tokenizer.save(folder / "tokenizer")
    shown.phase("fitting the encoder")
    texts = islice(_training_texts(corpus, tokenizer, config), config.fit_documents)
    _encoder(config, sources, latents, given_shape(results), texts).save(folder / "encoder")
    return {"grouping": grouping, **problems.result()}


def _encoder(
    config: PrepareConfig,
    sources: Sequence[dict[str, Any]],
    latents: LatentFile | None,
    shape: tuple[int, int] | None,
    texts: Iterable[str],
) -> LatentEncoder:
    """Fitted to `texts`; or the one that stands for `latents`, or for those of `shape` that came with the documents."""
    kind, _, name = config.encoder.partition(":")
    if config.imports_latents:
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        revision, shape = (latents.revision, latents.shape) if latents else (digest, shape)
        assert shape is not None, "a document without latents"
        return ImportedLatents(config.latents_of or kind, revision, shape, config.channels, config.normalise)
    encoder: LatentEncoder
    if kind == "lsa":
        encoder = LsaEncoder.fit(texts, config.channels or 64, config.seed)
    else:
        encoder = SentenceTransformerEncoder(
            name,
            config.channels,
            config.prompt,
            config.normalise,
            config.prompt_name,
            config.encoder_revision,
            config.encoder_batch_size,
            config.encoder_device,
        )
    return ChunkedEncoder(encoder, config.latent_tokens) if config.latent_tokens else encoder


def fitted_encoder(config: PrepareConfig, folder: Path) -> LatentEncoder:
    """The one that `fit` has left in its folder."""
    return load_encoder(folder / "encoder", batch_size=config.encoder_batch_size, device=config.encoder_device)


def _tokenizer(config: PrepareConfig, corpus: Corpus) -> Tokenizer:
    if config.tokenizer in ("bpe", "words"):
        texts = (document.text for document in corpus.training_sample(config.fit_documents))
        train = Tokenizer.train if config.tokenizer == "bpe" else Tokenizer.words
        return train(texts, config.vocab_size)
    return Tokenizer.characters() if config.tokenizer == "characters" else Tokenizer.load(config.tokenizer)


def _training_texts(corpus: Corpus, tokenizer: Tokenizer, config: PrepareConfig) -> Iterator[str]:
    """Texts of samples, so of the parts that long documents are split into."""
    found: list[Problem] = []
    some = False
    sample = corpus.training_sample(config.fit_documents)
    for batch in batches((TRAIN, document) for document in sample):
        for piece in pieces_of(batch, tokenizer, config, found.append)[0]:
            some = True
            yield piece.text
        serious = [problem for problem in found if not problem.harmless]
        if config.on_problem == "error":  # else they are counted when all documents are encoded
            settle(config, [{"serious": len(serious), "first": str(*serious[:1])}])
        found.clear()
    if not some:
        raise DataError("split train has no samples; expected documents of at least --min-length tokens")
