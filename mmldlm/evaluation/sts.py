"""Semantic textual similarity: how well similarities of generated latents correlate with human scores.

The data are pairs of sentences with a score (SemEval-2017 task 1, arXiv 1708.00055). We use Spearman's correlation, as
in arXiv 1908.10084.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm.errors import DataError
from mmldlm.evaluation.evaluator import Evaluation
from mmldlm.evaluation.statistics import cosine, spearman

MIN_PAIRS = 3
KEYS = ("sentence1", "sentence2", "score")


class Pair(NamedTuple):
    """Two sentences and the score of their similarity."""

    first: str
    second: str
    score: float


def read_pairs(path: Path) -> list[Pair]:
    """Read a `.tsv` with two sentences and a score per line, or a `.jsonl` with sentence1, sentence2 and score.

    Raises:
        DataError: The file cannot be read, a line is no pair, or there are too few pairs.
    """
    if path.suffix not in (".tsv", ".jsonl"):
        raise DataError(f"--sts {path}: expected a .tsv or .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--sts {path}: cannot be read ({error})") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pairs.append(_parse(line, path.suffix))
        except (ValueError, KeyError, TypeError):
            is_tsv = path.suffix == ".tsv"
            expected = "two sentences and a number separated by tabs" if is_tsv else f"keys {', '.join(KEYS)}"
            raise DataError(f"--sts {path}: line {number}: expected {expected}, found {line[:80]!r}") from None
    if len(pairs) < MIN_PAIRS or len({pair.score for pair in pairs}) < 2:
        raise DataError(f"--sts {path}: {len(pairs)} pairs, expected at least {MIN_PAIRS}, of different scores")
    return pairs


def _parse(line: str, suffix: str) -> Pair:
    """Parse the pair in a line. Raises ValueError, KeyError or TypeError if it has none."""
    first, second, number = line.split("\t") if suffix == ".tsv" else map(json.loads(line).__getitem__, KEYS)
    score = float(number)
    if not all(isinstance(text, str) and text.strip() for text in (first, second)) or not math.isfinite(score):
        raise ValueError
    return Pair(first, second, score)


def tokenize_sentences(evaluation: Evaluation, pairs: list[Pair]) -> tuple[list[str], list[list[int]]]:
    """Return the distinct sentences of all pairs and their tokens. A `DataError` names a sentence that is too long."""
    sentences = list(dict.fromkeys(text for pair in pairs for text in pair[:2]))
    tokens = evaluation.run.tokenizer.encode_batch(sentences)
    max_length = evaluation.run.store.manifest.max_length
    for sentence, ids in zip(sentences, tokens, strict=True):
        if not 1 <= len(ids) <= max_length:
            raise DataError(
                f"--sts: expected sentences of 1 to {max_length} tokens, found {len(ids)}: {sentence[:80]!r}"
            )
    return sentences, tokens


def sts_metrics(evaluation: Evaluation, pairs: list[Pair]) -> dict[str, Any]:
    """Correlate the scores with cosines of generated latents, and of the encoder's latents (collective).

    The baseline `sts_spearman_shuffled` pairs each first sentence with the second sentence of the next pair.
    """
    evaluation.progress.phase("latents of pairs of sentences")
    sentences, tokens = tokenize_sentences(evaluation, pairs)
    latents = evaluation.run.store.restore(evaluation.generate_latents(tokens, evaluation.run.config.sampling))
    encoded = evaluation.encode(sentences)
    index_of = {sentence: index for index, sentence in enumerate(sentences)}
    first = np.array([index_of[pair.first] for pair in pairs])
    second = np.array([index_of[pair.second] for pair in pairs])
    scores = np.array([pair.score for pair in pairs])
    encoder_cosine = cosine(encoded[first], encoded[second])
    known = np.isfinite(encoder_cosine)
    return {
        "sts_pairs": len(pairs),
        "sts_spearman": spearman(cosine(latents[first], latents[second]), scores),
        "sts_spearman_shuffled": spearman(cosine(latents[first], latents[np.roll(second, -1)]), scores),
        "sts_spearman_encoder": spearman(encoder_cosine[known], scores[known]) if known.sum() >= MIN_PAIRS else None,
        "sts_unencodable": int((~known).sum()),
    }
