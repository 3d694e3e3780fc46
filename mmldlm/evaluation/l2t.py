"""Metrics of l2t: compare texts generated from latents with the documents of these latents."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from mmldlm.diffusion.decoding import has_doubled_word
from mmldlm.evaluation.evaluator import Chooser, Evaluation
from mmldlm.evaluation.statistics import cosine, length_buckets, share_with_interval, with_interval
from mmldlm.utils.intervals import ratio_of_sums

BOOTSTRAPS = 1000
NUM_SHOWN_SAMPLES = 20  # shown in samples.md
NEAR_COPY = 0.9  # a text this similar to a training text counts as a copy
# Letters of scripts without spaces between words: Thai and Lao, Tibetan, Burmese, Khmer, kana, Chinese.
_UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")
_CHINESE, _LETTER = re.compile("[\u3400-\u9fff\U00020000-\U0003ffff]"), re.compile(r"[^\W\d_]")
# Choices among the same candidates of a document's latent, by the suffix of their metrics.
CHOICES: dict[Chooser, str] = {
    "search": "",
    "encoder": "_without_search",
    "network": "_by_network",
    "network_shuffled": "_by_network_shuffled",
}


def reference_metrics(
    tokens: Sequence[Sequence[int]],
    texts: Sequence[str],
    reference_tokens: Sequence[Sequence[int]],
    references: Sequence[str],
    tokenize: str = "auto",
    with_intervals: bool = False,
    unknown: int | None = None,
) -> dict[str, Any]:
    """Compare texts with references by tokens at the same positions, by words and by characters.

    If a reference has the token `unknown` in place of a word, no text counts as exact. `tokenize` is the setting
    `evaluation.bleu_tokenize`. BLEU uses n-grams of up to four words, or fewer if the longest reference is shorter. It
    is None if that reference has no words. The intervals of BLEU and chrF come from a bootstrap over documents (Koehn,
    2004, EMNLP), which takes seconds.
    """
    from sacrebleu.metrics import BLEU, CHRF  # imported here, because every training imports this module
    from sacrebleu.significance import _bootstrap_resample

    # `map` ends with the shorter sequence.
    matches = [sum(map(int.__eq__, text, true)) for text, true in zip(tokens, reference_tokens, strict=True)]
    accuracy = ratio_of_sums(
        np.array(matches, np.float64), np.array([len(text) for text in reference_tokens], np.float64)
    )
    exact = exact_matches(texts, references, reference_tokens, unknown)
    metrics = with_interval("token_accuracy", accuracy) | share_with_interval("exact_match", exact)
    # `force` only silences a warning about references that look tokenized.
    bleu = BLEU(force=True, tokenize=bleu_tokenizer(references, tokenize))
    words = max(len(bleu.tokenizer(reference.rstrip()).split()) for reference in references)
    bleu.max_ngram_order = max(1, min(bleu.max_ngram_order, words))
    for name, metric in (("bleu", bleu), ("chrf", CHRF())):
        metrics[name] = metric.corpus_score(list(texts), [list(references)]).score
        if with_intervals:
            # `corpus_score(n_bootstrap=...)` does not help: it ends in a TypeError if some resamples score 0.
            statistics = metric._extract_corpus_statistics(list(texts), [list(references)])
            _, scores = _bootstrap_resample(statistics, metric, BOOTSTRAPS)
            ends = np.percentile([float(score.score) for score in scores], [2.5, 97.5])
            metrics[f"{name}_ci95"] = ends.tolist()
    return metrics if words else {key: None if key.startswith("bleu") else metrics[key] for key in metrics}


def exact_matches(
    texts: Sequence[str], references: Sequence[str], tokens: Sequence[Sequence[int]], unknown: int | None
) -> np.ndarray:
    """Return which texts equal their references, bool [n]. False if the reference's tokens lack words."""
    compared = zip(texts, references, tokens, strict=True)
    return np.array([text == true and unknown not in own for text, true, own in compared])


def bleu_tokenizer(texts: Sequence[str], tokenize: str) -> str:
    """Return sacreBLEU's tokenizer for `evaluation.bleu_tokenize`. For "auto", the script of the texts decides."""
    text = "".join(texts)
    letters, unspaced, chinese = (len(pattern.findall(text)) for pattern in (_LETTER, _UNSPACED, _CHINESE))
    by_script = "13a" if 2 * unspaced <= letters else "zh" if chinese > 0.9 * unspaced else "char"  # as Japanese
    return by_script if tokenize == "auto" else tokenize


def reencoding_metrics(encoded: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    """Return the mean cosine between the encoder's latents of generated texts and `truth`, both [n, M, C].

    A text without a latent has a row of NaN. Such texts are left out and counted.
    """
    similarity = cosine(encoded, truth).astype(np.float64)
    finite = similarity[np.isfinite(similarity)]
    metrics: dict[str, Any] = {"reencoded_cosine": None, "reencoded_cosine_ci95": None}
    if len(finite):
        metrics = with_interval("reencoded_cosine", ratio_of_sums(finite, np.ones(len(finite))))
    return {**metrics, "unencodable": len(similarity) - len(finite)}


def fault_metrics(
    tokens: Sequence[Sequence[int]], reference_tokens: Sequence[Sequence[int]], words: Set[int]
) -> dict[str, float]:
    """Return the share of texts with a doubled word, and of texts that swapping two neighbors would make exact."""
    doubled = [has_doubled_word(text, words) for text in tokens]
    swapped = 0
    for text, true in zip(tokens, reference_tokens, strict=True):
        wrong = [place for place, pair in enumerate(zip(text, true, strict=False)) if pair[0] != pair[1]]
        if len(text) == len(true) and len(wrong) == 2 and wrong[1] == wrong[0] + 1:
            first, second = wrong
            swapped += (text[first], text[second]) == (true[second], true[first])
    return {"doubled_words": sum(doubled) / len(tokens), "swapped_neighbors": swapped / len(tokens)}


def memorization_metrics(evaluation: Evaluation, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measure how similar generated texts, and held-out documents (`_true`), are to their nearest training texts.

    Returns mean similarities and shares of near copies (collective).
    """
    evaluation.progress.phase("nearest training texts")
    metrics: dict[str, Any] = {}
    compared = {"": evaluation.training_similarity(tokens), "_true": evaluation.document_similarity[: len(tokens)]}
    for suffix, similarity in compared.items():
        metrics[f"training_similarity{suffix}"] = float(similarity.mean())
        metrics[f"training_copies{suffix}"] = float((similarity >= NEAR_COPY).mean())
    return metrics


def text_metrics(evaluation: Evaluation) -> dict[str, Any]:
    """Return the l2t metrics of texts whose lengths the network finds, as a user gets them (collective).

    A suffix says that other texts were measured: `_true_length` with the document's length, `_shuffled` from another
    document's latent, `_mean_latent` from the mean latent, `_unigram` drawn by token frequency, `_true` the references.
    `_without_search` are texts that no search has edited.
    `_by_network` are texts chosen by the network's t2l, as where no encoder is at hand, and `_by_network_shuffled` is
    their control: the choice compares with another document's latent.
    """
    count = evaluation.num_texts
    reference_tokens = evaluation.tokens[:count]
    references, truth = evaluation.decode(reference_tokens), evaluation.raw_latents[:count]
    sampling, words = evaluation.run.config.sampling, frozenset(evaluation.run.tokenizer.word_ids)
    tokenize = bleu_tokenizer(references, evaluation.run.config.evaluation.bleu_tokenize)
    unknown = evaluation.run.tokenizer.unknown_id
    lacking = sum(unknown in tokens for tokens in reference_tokens) / count
    metrics: dict[str, Any] = {"texts": count, "bleu_tokenize": tokenize, "references_lacking_words": lacking}

    def add(suffix: str, tokens: Sequence[Sequence[int]]) -> list[str]:
        texts = evaluation.decode(tokens)
        compared = tokens, texts, reference_tokens, references, tokenize
        measured = reference_metrics(*compared, with_intervals=not suffix, unknown=unknown)
        measured |= reencoding_metrics(evaluation.encode(texts), truth)
        measured |= fault_metrics(tokens, reference_tokens, words)
        metrics.update({add_suffix(key, suffix): value for key, value in measured.items()})
        return texts

    evaluation.progress.phase("texts from latents, latent own")
    choosers: list[Chooser] = ["search"]
    choosers += ["encoder"] if evaluation.run.search_rounds(sampling) else []
    choosers += ["network", "network_shuffled"] if evaluation.run.encodes else []
    made = dict(zip(choosers, evaluation.generate_texts("own", count, sampling, choosers), strict=True))
    texts = {chooser: add(CHOICES[chooser], samples.tokens) for chooser, samples in made.items()}["search"]
    metrics["passes_per_text"] = made["search"].passes
    metrics |= memorization_metrics(evaluation, made["search"].tokens)
    pairs = zip(references[:NUM_SHOWN_SAMPLES], texts[:NUM_SHOWN_SAMPLES], strict=True)
    metrics["samples"] = [{"reference": reference, "generation": text} for reference, text in pairs]
    exact = exact_matches(texts, references, reference_tokens, unknown)
    metrics["exact_match_by_length"] = [
        {**row, "texts": int(inside.sum()), **share_with_interval("exact_match", exact[inside])}
        for row, inside in length_buckets(evaluation.lengths[:count])
    ]
    # Baselines try only the median length: choosing among useless texts is not worth the time.
    one_length = replace(sampling, tried_lengths=1)
    evaluation.progress.phase("texts from latents, latent shuffled")
    add("_shuffled", evaluation.generate("l2t", "shuffled", count, one_length, "encoder").tokens)
    evaluation.progress.phase("texts from latents, latent mean")
    add("_mean_latent", evaluation.generate("l2t", "mean", count, one_length, "encoder").tokens)
    evaluation.progress.phase("texts from latents, at the documents' lengths")
    add("_true_length", evaluation.generate("l2t", "own", count, sampling).tokens)
    evaluation.progress.phase("texts from token frequencies")
    add("_unigram", evaluation.unigram_tokens(count))
    upper_bound = reencoding_metrics(evaluation.encode(references), truth)
    upper_bound |= {"doubled_words": fault_metrics(reference_tokens, reference_tokens, words)["doubled_words"]}
    return metrics | {add_suffix(key, "_true"): value for key, value in upper_bound.items()}


def add_suffix(key: str, suffix: str) -> str:
    """Insert `suffix` into a key, before `_ci95` if it has that, e.g. `token_accuracy_shuffled_ci95`."""
    name, ci, rest = key.partition("_ci95")
    return name + suffix + ci + rest
