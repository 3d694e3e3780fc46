"""`mmldlm prepare`: raw text to a store. Splits by document, then fits tokenizer and encoder on the training split."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mmldlm.data import python_docs
from mmldlm.data.corpora import Document, Problem
from mmldlm.data.duplicates import exact_groups, near_duplicate_groups
from mmldlm.data.encoders import (
    ImportedLatents,
    LatentEncoder,
    LsaEncoder,
    SentenceTransformerEncoder,
    StretchEncoder,
)
from mmldlm.data.imported_latents import LatentFile
from mmldlm.data.inputs import described, find_inputs, read_inputs
from mmldlm.data.manifest import MANIFEST_NAME, Manifest
from mmldlm.data.options import PrepareConfig, add_arguments, from_args
from mmldlm.data.reporting import Problems, Progress, say
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import SPLITS, StoreWriter
from mmldlm.errors import DataError, run_command

__all__ = ["PrepareConfig", "add_arguments", "from_args", "main", "prepare", "summary"]

_BATCH = 512
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Piece:
    """What becomes one sample: a document, or a part of one that was too long."""

    document: Document
    text: str
    tokens: np.ndarray


def prepare(config: PrepareConfig, progress: bool = True) -> Manifest:
    """Make the store `config.out` and return its manifest; at once where it exists with the same options and sources.

    UsageError for options that make no sense; DataError for input that cannot be used, a split without
    samples, or an existing store of other data.
    """
    config.check()
    inputs = find_inputs(config)
    sources = python_docs.sources() if config.corpus else described(inputs, config)
    if (existing := _existing(config, sources)) is not None:
        return existing
    problems = Problems(config)
    bar = Progress(progress)
    stream = python_docs.read_python_docs() if config.corpus else read_inputs(inputs, config)
    documents: list[Document] = []
    for found in bar(stream, "reading documents"):
        if isinstance(found, Problem):
            problems.add(found)
        else:
            documents.append(found)
    problems.settle()
    if not documents:
        raise DataError(f"{config.corpus or ', '.join(config.inputs)}: no documents; expected text")
    documents, grouping = _grouped(documents, config)
    splits = _split(documents, config)
    for split, members in splits.items():
        if not members:
            raise DataError(
                f"split {split} has no documents of {len(documents)} in {grouping['groups']} groups; "
                "expected more documents or a larger fraction"
            )
    tokenizer = _tokenizer(config, [document.text for document in splits["train"]])
    over_length = 0
    pieces: dict[str, list[_Piece]] = {}
    for split, members in splits.items():
        pieces[split], count = _pieces(bar(members, f"tokenizing {split}"), tokenizer, config, problems)
        over_length += count
    problems.settle()
    if not pieces["train"]:
        raise DataError("split train has no samples; expected documents of at least --min-length tokens")
    encoder = _encoder(config, sources, pieces["train"])
    with StoreWriter(config.out, tokenizer, encoder, config.latent_dtype, overwrite=config.overwrite) as writer:
        for split in SPLITS:
            for batch in batches(bar(pieces[split], f"encoding {split}")):
                _write(writer, split, batch, encoder, problems)
        problems.settle()
        if config.corpus:
            per_package = Counter(document.source.split("/")[0] for document in documents)
            sources = [source | {"documents": per_package[source["package"]]} for source in sources]
        manifest = writer.finish(
            sources=sources,
            options=config.recorded(),
            problems={**dict(sorted(problems.counts.items())), "over_length": over_length},
            grouping=grouping,
            extra_files={"problems.jsonl": problems.to_jsonl()},
        )
    say(summary(manifest))
    return manifest


def summary(manifest: Manifest) -> str:
    """The table printed at the end."""
    rows = [f"{'split':<12}{'samples':>10}{'tokens':>12}{'characters':>12}{'char/token':>12}{'mean length':>13}"]
    for name, split in manifest.splits.items():
        rows.append(
            f"{name:<12}{split.samples:>10,}{split.tokens:>12,}{split.characters:>12,}"
            f"{split.characters / split.tokens:>12.2f}{split.tokens / split.samples:>13.1f}"
        )
    problems = ", ".join(f"{count} {kind}" for kind, count in manifest.problems.items() if count) or "none"
    rows.append(
        f"longest sample {manifest.max_length} tokens; vocabulary {manifest.vocab_size}; latents "
        f"{manifest.latent.tokens} x {manifest.latent.channels} of {manifest.encoder['name']}; problems: {problems}"
    )
    return "\n".join(rows)


def _existing(config: PrepareConfig, sources: list[dict[str, Any]]) -> Manifest | None:
    """The manifest of a store that holds what is asked for; DataError where it holds something else."""
    out = Path(config.out)
    for left in sorted(out.parent.glob(f"{out.name}.incomplete-*")):
        say(f"{left}: left by an interrupted preparation; delete it unless another one is running")
    if not out.exists() or (config.overwrite and (out / MANIFEST_NAME).is_file()):
        return None
    if not (out / MANIFEST_NAME).is_file():
        raise DataError(f"{out}: exists and is no data store; --overwrite replaces stores only")
    manifest = Manifest.read(out)
    known = [{key: value for key, value in source.items() if key != "documents"} for source in manifest.sources]
    options = json.loads(json.dumps(config.recorded()))
    differing = [key for key, value in options.items() if manifest.options.get(key) != value]
    if known != sources:
        differing.append("sources")
    if differing:
        raise DataError(f"{out}: a store with other {', '.join(differing)}; expected a new folder, or --overwrite")
    say(f"{out}: already prepared\n{summary(manifest)}")
    return manifest


def _grouped(documents: list[Document], config: PrepareConfig) -> tuple[list[Document], dict[str, Any]]:
    texts = [document.text for document in documents]
    if config.near_duplicates or config.corpus:
        keys, statistics = near_duplicate_groups(texts)
    else:
        keys = exact_groups(texts)
        counts = Counter(keys)
        statistics = {"method": "exact", "documents": len(texts), "groups": len(counts)}
        statistics["largest_group"] = max(counts.values())
    return [replace(document, group=key) for document, key in zip(documents, keys, strict=True)], statistics


def _split(documents: Iterable[Document], config: PrepareConfig) -> dict[str, list[Document]]:
    """By a hash of the group and the seed, so that a document's split does not depend on the others'."""
    splits: dict[str, list[Document]] = {split: [] for split in SPLITS}
    for document in documents:
        digest = hashlib.blake2b(f"{config.seed}:{document.group}".encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "big") / 2**64
        if place < config.test_fraction:
            splits["test"].append(document)
        elif place < config.test_fraction + config.validation_fraction:
            splits["validation"].append(document)
        else:
            splits["train"].append(document)
    return splits


def _tokenizer(config: PrepareConfig, texts: Sequence[str]) -> Tokenizer:
    if config.tokenizer == "bpe":
        return Tokenizer.train(texts, config.vocab_size)
    return Tokenizer.characters() if config.tokenizer == "characters" else Tokenizer.load(config.tokenizer)


def _encoder(config: PrepareConfig, sources: list[dict[str, Any]], pieces: Sequence[_Piece]) -> LatentEncoder:
    kind, _, name = config.encoder.partition(":")
    if config.imports_latents:
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        revision = digest if kind == "included" else LatentFile(name, config.latent_ids).revision
        shape = pieces[0].document.latents.shape  # type: ignore[union-attr]
        return ImportedLatents(config.latents_of or kind, revision, shape, config.channels, config.normalise)
    encoder: LatentEncoder
    if kind == "lsa":
        encoder = LsaEncoder.fit([piece.text for piece in pieces], config.channels or 64, config.seed)
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
    return StretchEncoder(encoder, config.latent_tokens) if config.latent_tokens else encoder


def _pieces(
    documents: Iterable[Document], tokenizer: Tokenizer, config: PrepareConfig, problems: Problems
) -> tuple[list[_Piece], int]:
    """The samples of `documents` and how many of these were too long."""
    pieces, over_length = [], 0
    for batch in batches(documents):
        encoded = iter(_encode([document for document in batch if document.tokens is None], tokenizer, problems))
        for document in batch:
            ids = next(encoded) if document.tokens is None else document.tokens
            if ids is None:
                continue
            tokens = np.asarray(ids, np.int64)
            if len(tokens) < config.min_length:
                reason = f"{len(tokens)} tokens, expected at least {config.min_length}"
                problems.add(Problem(document.source, document.line, "too_short", reason))
            elif len(tokens) <= config.max_length:
                pieces.append(_Piece(document, document.text, tokens))
            elif document.latents is not None and config.over_length == "split":
                reason = (
                    f"{len(tokens)} tokens, but one latent, which cannot be split: expected at most --max-length "
                    f"{config.max_length}, or --over-length cut"
                )
                problems.add(Problem(document.source, document.line, "too_long", reason))
            else:
                over_length += 1
                # Parts of equal size, so that no crumb of a few tokens is left over.
                parts = np.array_split(tokens, -(-len(tokens) // config.max_length))
                parts = [tokens[: config.max_length]] if config.over_length == "cut" else parts
                texts = tokenizer.decode_batch([part.tolist() for part in parts])
                pieces += [_Piece(document, text, part) for text, part in zip(texts, parts, strict=True)]
    return pieces, over_length


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, problems: Problems) -> list[list[int] | None]:
    """Ids of each document; None, and a problem told, where the tokenizer cannot spell one."""
    try:
        return [*tokenizer.encode_batch([document.text for document in documents])]
    except DataError as error:
        if len(documents) > 1:
            return [ids for document in documents for ids in _encode([document], tokenizer, problems)]
        problems.add(Problem(documents[0].source, documents[0].line, "unencodable", str(error)))
        return [None]


def _write(
    writer: StoreWriter, split: str, pieces: Sequence[_Piece], encoder: LatentEncoder, problems: Problems
) -> None:
    if isinstance(encoder, ImportedLatents):
        latents = encoder.take([piece.document.latents for piece in pieces if piece.document.latents is not None])
    else:
        latents = encoder.encode([piece.text for piece in pieces])
    finite = np.isfinite(latents).all(axis=(1, 2))
    for index in np.flatnonzero(~finite).tolist():
        document = pieces[index].document
        reason = f"the encoder gives no latent for {pieces[index].text[:40]!r}"
        problems.add(Problem(document.source, document.line, "no_latent", reason))
    kept = [piece for piece, good in zip(pieces, finite, strict=True) if good]
    writer.add(split, [piece.tokens for piece in kept], latents[finite], [len(piece.text) for piece in kept])


def batches(items: Iterable[_T]) -> Iterator[list[_T]]:
    batch: list[_T] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def main(argv: list[str] | None = None) -> int:
    """`mmldlm prepare`; returns 0, lets `MmldlmError` pass."""
    parser = argparse.ArgumentParser("mmldlm prepare", description=__doc__)
    add_arguments(parser)
    prepare(from_args(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
