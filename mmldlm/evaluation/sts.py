"""Semantic textual similarity: do latents say which sentences mean the same?

The data are pairs of sentences with a score (SemEval-2017 task 1, arXiv 1708.00055). We use Spearman's correlation of
the cosines with the scores, as in arXiv 1908.10084. Pairs of the highest score are paraphrases: we look up whether the
second sentence is nearer to the first than those of the other paraphrases. Baselines are the encoder's latents, and
TF-IDF, which only counts common words.

Shape letters: n pairs, s sentences, D numbers of a sentence's vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mmldlm.data.encoders.lsa import tfidf
from mmldlm.data.nearest import unit_vectors
from mmldlm.errors import DataError
from mmldlm.evaluation.evaluator import Evaluation
from mmldlm.evaluation.statistics import retrieval_ranks, share_with_interval, spearman

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
    """Compare the scores with cosines of generated latents, of the encoder's latents, and of TF-IDF (collective).

    The baseline `sts_spearman_shuffled` pairs each first sentence with the second sentence of a pair drawn at random.
    """
    evaluation.progress.phase("latents of pairs of sentences")
    sentences, tokens = tokenize_sentences(evaluation, pairs)
    latents = evaluation.run.store.restore(evaluation.generate_latents(tokens, evaluation.run.config.sampling))
    compared, encoded = evaluation.run.store.manifest.compared, evaluation.encode(sentences)
    generated = torch.from_numpy(unit_vectors(latents[:, compared]))
    known = dict(zip(sentences, np.isfinite(encoded).all(axis=(1, 2)).tolist(), strict=True))
    shuffled = shuffle_pairs(pairs, evaluation.config.seed)
    return {
        "sts_pairs": len(pairs),
        "sts_unencodable": sum(not (known[pair.first] and known[pair.second]) for pair in pairs),
        **similarity_metrics(generated, sentences, pairs),
        "sts_spearman_shuffled": similarity_metrics(generated, sentences, shuffled)["sts_spearman"],
        **similarity_metrics(torch.from_numpy(unit_vectors(encoded[:, compared])), sentences, pairs, "_encoder"),
        **similarity_metrics(tfidf(sentences), sentences, pairs, "_tfidf"),
    }


def shuffle_pairs(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Give each first sentence and its score the second sentence of another pair, by a random cycle through all pairs.

    The next pair of the file would not do, since it is often about the same sentence.
    """
    cycle = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    return [Pair(pairs[a].first, pairs[b].second, pairs[a].score) for a, b in pairwise([*cycle, cycle[0]])]


def similarity_metrics(
    vectors_sD: torch.Tensor, sentences: Sequence[str], pairs: Sequence[Pair], suffix: str = ""
) -> dict[str, Any]:
    """Return Spearman's correlation of cosines with the scores, and recall@1 of the paraphrases.

    Args:
        vectors_sD: Vectors of the distinct `sentences` of all pairs, of unit norm, dense or sparse. NaN if a sentence
            cannot be encoded: its pairs do not count in the correlation, and as not found in the recall.
        suffix: Of the metrics' names.
    """
    index_of = {sentence: index for index, sentence in enumerate(sentences)}
    first = np.array([index_of[pair.first] for pair in pairs])
    second = np.array([index_of[pair.second] for pair in pairs])
    scores = np.array([pair.score for pair in pairs])
    a_nD, b_nD = (vectors_sD.index_select(0, torch.from_numpy(rows)) for rows in (first, second))
    products = a_nD * b_nD
    cosines = (torch.sparse.sum(products, 1).to_dense() if products.is_sparse else products.sum(1)).numpy()
    known = np.isfinite(cosines)
    found = np.zeros(len(pairs), bool)
    best = np.flatnonzero(known & (scores == scores.max()))
    a_best, b_best = (rows.index_select(0, torch.from_numpy(best)) for rows in (a_nD, b_nD))
    similarity = a_best @ b_best.to_dense().T
    found[best] = retrieval_ranks(similarity.numpy()) <= 1
    return {
        f"sts_spearman{suffix}": spearman(cosines[known], scores[known]) if known.sum() >= MIN_PAIRS else None,
        **share_with_interval(f"sts_recall_at_1{suffix}", found[scores == scores.max()]),
    }
