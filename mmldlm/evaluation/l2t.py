"""l2t: what is written from a latent beside the document that it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmldlm.evaluation.evaluator import Condition, Evaluation
from mmldlm.evaluation.statistics import cosine, ratio

SHOWN = 20  # pairs of samples.md
SUFFIXES: dict[Condition, str] = {"own": "", "shuffled": "_shuffled", "mean": "_mean_latent"}


def likeness(
    tokens: Sequence[Sequence[int]],
    texts: Sequence[str],
    reference_tokens: Sequence[Sequence[int]],
    references: Sequence[str],
) -> dict[str, Any]:
    """How near texts are to their references of the same lengths, by tokens, words and characters."""
    import sacrebleu  # here, since every training imports this module

    right = [sum(map(int.__eq__, own, true)) for own, true in zip(tokens, reference_tokens, strict=True)]
    accuracy = ratio(np.array(right, np.float64), np.array([len(text) for text in reference_tokens], np.float64))
    return {
        "token_accuracy": accuracy.value,
        "token_accuracy_ci95": list(accuracy.interval),
        "exact_match": float(np.mean([own == true for own, true in zip(texts, references, strict=True)])),
        # `force` only silences a warning of references that look tokenized.
        "bleu": sacrebleu.corpus_bleu(list(texts), [list(references)], force=True).score,
        "chrf": sacrebleu.corpus_chrf(list(texts), [list(references)]).score,
    }


def reencoded(encoded: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Mean cosine of the encoder's latents of what was written to `truth`, both [n, M, C].

    Texts that it has none for, rows of NaN, are left out and counted.
    """
    similar = cosine(encoded, truth).astype(np.float64)
    found = similar[np.isfinite(similar)]
    mean = ratio(found, np.ones(len(found))) if len(found) else None
    return {
        "reencoded_cosine": mean.value if mean else None,
        "reencoded_cosine_ci95": list(mean.interval) if mean else None,
        "unencodable": len(similar) - len(found),
    }


def text_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Collective: l2t. Keys with `_shuffled` and `_mean_latent` are the same of texts from another document's latent
    and from the mean latent, with `_unigram` of tokens drawn by frequency, with `_true` of the references."""
    count = evaluation.texts
    reference_tokens = evaluation.tokens[:count]
    references, truth = evaluation.decode(reference_tokens), evaluation.raw_latents[:count]
    found: dict[str, Any] = {"texts": count}

    def add(suffix: str, tokens: list[list[int]]) -> list[str]:
        texts = evaluation.decode(tokens)
        measured = likeness(tokens, texts, reference_tokens, references)
        measured |= reencoded(evaluation.encode(texts), truth)
        found.update({_with(key, suffix): value for key, value in measured.items()})
        return texts

    for condition, suffix in SUFFIXES.items():
        evaluation.progress.phase(f"texts from latents, latent {condition}")
        written = add(suffix, evaluation.write("l2t", condition, count, evaluation.run.config.sampling).tokens)
        if condition == "own":
            pairs = zip(references[:SHOWN], written[:SHOWN], strict=True)
            found["samples"] = [{"reference": reference, "generation": text} for reference, text in pairs]
    evaluation.progress.phase("texts from token frequencies")
    add("_unigram", evaluation.unigram_tokens(count))
    of_references = reencoded(evaluation.encode(references), truth)
    return found | {_with(key, "_true"): value for key, value in of_references.items()}


def _with(key: str, suffix: str) -> str:
    """`bleu_shuffled`, `token_accuracy_shuffled_ci95`."""
    name, ci, rest = key.partition("_ci95")
    return name + suffix + ci + rest
