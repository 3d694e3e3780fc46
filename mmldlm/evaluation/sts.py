"""Semantic textual similarity: whether the latents found for two sentences are as near as people say they are.

Pairs of sentences with a score (SemEval-2017 task 1, arXiv 1708.00055); the correlation is Spearman's, as in
arXiv 1908.10084.
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

FEWEST = 3  # pairs
KEYS = ("sentence1", "sentence2", "score")


class Pair(NamedTuple):
    first: str
    second: str
    score: float


def read_pairs(path: Path) -> list[Pair]:
    """From a `.tsv` of two sentences and a score a line, or a `.jsonl` of sentence1, sentence2 and score.

    DataError naming the line that is none.
    """
    if path.suffix not in (".tsv", ".jsonl"):
        raise DataError(f"--sts {path}: expected a .tsv or .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--sts {path}: cannot be read ({error})") from None
    read = _tsv if path.suffix == ".tsv" else _json
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        pair = read(line)
        if pair is None:
            expected = "two sentences and a number with tabs between" if read is _tsv else f"keys {', '.join(KEYS)}"
            raise DataError(f"--sts {path}: line {number}: expected {expected}, found {line[:80]!r}")
        pairs.append(pair)
    if len(pairs) < FEWEST or len({pair.score for pair in pairs}) < 2:
        raise DataError(f"--sts {path}: {len(pairs)} pairs, expected at least {FEWEST}, of different scores")
    return pairs


def _tsv(line: str) -> Pair | None:
    return _pair(line.split("\t"))


def _json(line: str) -> Pair | None:
    try:
        found = json.loads(line)
        return _pair([found[key] for key in KEYS])
    except (ValueError, KeyError, TypeError):
        return None


def _pair(fields: list[Any]) -> Pair | None:
    if len(fields) != len(KEYS) or not all(isinstance(text, str) and text.strip() for text in fields[:2]):
        return None
    try:
        score = float(fields[2])
    except (ValueError, TypeError):
        return None
    return Pair(fields[0], fields[1], score) if math.isfinite(score) else None


def encode_sentences(evaluation: Evaluation, pairs: list[Pair]) -> tuple[list[str], list[list[int]]]:
    """The different sentences of all pairs, and their tokens; DataError naming one that is too long."""
    sentences = list(dict.fromkeys(text for pair in pairs for text in pair[:2]))
    tokens = evaluation.run.tokenizer.encode_batch(sentences)
    longest = evaluation.run.store.manifest.max_length
    for sentence, found in zip(sentences, tokens, strict=True):
        if not 1 <= len(found) <= longest:
            raise DataError(
                f"--sts: expected sentences of 1 to {longest} tokens, found {len(found)}: {sentence[:80]!r}"
            )
    return sentences, tokens


def sts_metrics(evaluation: Evaluation, pairs: list[Pair]) -> dict[str, Any]:
    """Collective: the correlation of scores with cosines of the network's latents, and of the encoder's own.

    The control pairs each first sentence with the next pair's second one.
    """
    evaluation.progress.phase("latents of pairs of sentences")
    sentences, tokens = encode_sentences(evaluation, pairs)
    made = evaluation.run.store.restore(evaluation.latents_of(tokens, evaluation.run.config.sampling))
    encoded = evaluation.encode(sentences)
    place = {sentence: number for number, sentence in enumerate(sentences)}
    first = np.array([place[pair.first] for pair in pairs])
    second = np.array([place[pair.second] for pair in pairs])
    scores = np.array([pair.score for pair in pairs])
    of_encoder = cosine(encoded[first], encoded[second])
    known = np.isfinite(of_encoder)
    return {
        "sts_pairs": len(pairs),
        "sts_spearman": spearman(cosine(made[first], made[second]), scores),
        "sts_spearman_shuffled": spearman(cosine(made[first], made[np.roll(second, -1)]), scores),
        "sts_spearman_encoder": spearman(of_encoder[known], scores[known]) if known.sum() >= FEWEST else None,
        "sts_unencodable": int((~known).sum()),
    }
