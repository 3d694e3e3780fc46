"""Format the results of an evaluation: a table with the baselines next to each value, and samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mmldlm.optim.ema import WEIGHTS_LABELS
from mmldlm.utils.format import format_number

# (name, key, baselines by label). A baseline is a key, or a suffix of the metric's key. The interval's key has `_ci95`.
Row = tuple[str, str, dict[str, str]]

_number = partial(format_number, decimals=3)

_LIKELIHOOD: list[Row] = [
    ("  without similar documents", "bits_per_token_novel", {"all": "bits_per_token"}),
    ("  exact, up to 64 tokens", "bits_per_token_by_confidence_up_to_64", {"bound": "_bound"}),
]
_TEXT: list[Row] = [
    ("bits per token", "bits_per_token", {"unigram": "unigram_bits_per_token"}),
    ("bits per character", "bits_per_character", {"unigram": "unigram_bits_per_character"}),
    *_LIKELIHOOD,
    (
        "bits per token with length",
        "bits_per_token_with_length",
        {name: f"{name}_bits_per_token_with_length" for name in ("unigram", "trigram")},
    ),
]
_MEMORIZATION: list[Row] = [
    ("similarity to training text", "training_similarity", {"held-out": "_true"}),
    ("copies of training texts", "training_copies", {"held-out": "_true"}),
]
_BY_NETWORK = {"by network": "_by_network", "by network, shuffled": "_by_network_shuffled"}
_OWN_LENGTH = {
    "without search": "_without_search",
    "true length": "_true_length",
    **_BY_NETWORK,
    "shuffled": "_shuffled",
    "mean": "_mean_latent",
    "unigram": "_unigram",
}
_OTHERS = {"shuffled": "_shuffled", "mean": "_mean_latent", "unigram": "_unigram"}
_L2T: list[Row] = [
    ("bits per token given the latent", "bits_per_token", {**_OTHERS, "bag of words": "_bag_of_words"}),
    *_LIKELIHOOD,
    ("token accuracy", "token_accuracy", _OWN_LENGTH),
    ("exact match", "exact_match", _OWN_LENGTH),
    ("BLEU", "bleu", _OWN_LENGTH),
    ("chrF", "chrf", _OWN_LENGTH),
    ("re-encoded cosine", "reencoded_cosine", {**_OWN_LENGTH, "references": "_true"}),
    ("references that lack words", "references_lacking_words", {}),
    ("texts with a doubled word", "doubled_words", {"true length": "_true_length", "references": "_true"}),
    ("texts with swapped neighbors", "swapped_neighbors", {"true length": "_true_length"}),
    *_MEMORIZATION,
]
_RANKS = {"chance": "_chance", "ridge": "_ridge"}
_T2L: list[Row] = [
    ("cosine", "cosine", {"mean": "_mean_latent", "shuffled": "_shuffled", "ridge": "_ridge"}),
    ("recall@1", "recall_at_1", _RANKS),
    ("recall@10", "recall_at_10", _RANKS),
    ("median rank", "median_rank", _RANKS),
    ("STS Spearman", "sts_spearman", {"shuffled": "_shuffled", "encoder": "_encoder", "TF-IDF": "_tfidf"}),
    ("recall@1 of paraphrases", "sts_recall_at_1", {"encoder": "_encoder", "TF-IDF": "_tfidf"}),
]
_TEXTS = {"held-out": "_true", "unigram": "_unigram"}
_JOINT: list[Row] = [
    ("trigram bits per token", "trigram_bits_per_token", {**_TEXTS, "shuffled words": "_shuffled_words"}),
    ("token entropy (bits)", "token_entropy", _TEXTS),
    ("distinct-1", "distinct_1", _TEXTS),
    ("distinct-2", "distinct_2", _TEXTS),
    ("distinct-3", "distinct_3", _TEXTS),
    ("repetition (4-grams)", "repetition_4", _TEXTS),
    ("latent Frechet distance", "frechet_distance", {"held-out": "_true", "noise": "_noise"}),
    ("cosine to the drawn latent", "reencoded_cosine_drawn", {"shuffled": "_shuffled"}),
    ("  to t2l of the finished text", "reencoded_cosine", {"shuffled": "_shuffled"}),
    *_MEMORIZATION,
]
_LATENTS = {"own latent": "_own_latent", "another text's": "_shuffled"}
_EDIT: list[Row] = [
    ("spans that changed", "changed", {**_LATENTS, "unigram": "_unigram"}),
    ("tokens outside that were kept", "kept", {}),
    ("trigram bits per token", "trigram_bits_per_token", {"documents": "_true", **_LATENTS, "unigram": "_unigram"}),
]
_INTERPOLATION: list[Row] = [
    ("trigram bits per token", "trigram_bits_per_token", {"both documents": "_ends"}),
    ("re-encoded cosine", "reencoded_cosine", {}),
    ("near copies of a document", "copies", {}),
]


def table(result: Mapping[str, Any]) -> str:
    """Format the results of `evaluate` as text: metrics with baselines, then bounds by length and by noise bin."""
    what = f"step {result['step']}, {WEIGHTS_LABELS[result['weights']]}"
    lines = [f"{what}: {result['documents']} documents of split {result['split']}"]
    if "bits_per_token" in result:
        lines += _section("text alone", _TEXT, {**result, **result["controls"]})
    for mode, title, rows in (
        ("l2t", "l2t: {texts} texts from latents", _L2T),
        ("t2l", "t2l: latents from texts, {candidates} candidates", _T2L),
        ("joint", "joint: {texts} texts and latents from noise", _JOINT),
        ("edit", "a quarter of the words generated again, in {texts} documents", _EDIT),
        ("interpolation", "{texts} texts between the documents of {pairs} pairs", _INTERPOLATION),
    ):
        if mode in result:
            lines += _section(title.format(**result[mode]), rows, result[mode])
    for title, metrics, key in (
        ("text alone", {**result, **result.get("controls", {})}, "unigram_bits_per_token"),
        ("given the latent", result.get("l2t", {}), "bits_per_token_unigram"),
    ):
        if metrics.get("bits_per_token", 0) > metrics.get(key, math.inf):
            lines.append(f"  {title}: worse than unigram, which has the frequencies of single tokens alone")
    if result.get(key := "bits_per_token_with_length", 0) > result.get("controls", {}).get(f"trigram_{key}", math.inf):
        lines.append("  text alone, with length: worse than trigram, which has the frequencies of three tokens")
    joint = result.get("joint", {})
    if joint and joint["frechet_distance"] is None:
        lines.append(f"  the Frechet distance needs --texts {joint['frechet_samples_needed']} or more")
    for title, metrics in (("text alone", result), ("given the latent", result.get("l2t", {}))):
        if "exact_match_by_length" in metrics:
            lines += ["", "exact matches by length", *_columns(metrics["exact_match_by_length"])]
        if "by_length" in metrics:
            lines += ["", f"bits per token by length, {title}", *_columns(metrics["by_length"])]
            lines += ["", f"bits by noise bin, {title}", *_columns(metrics["by_t_text"], "t_text")]
    if "by_way_of_the_latent" in result:
        title = "bits per token by way of the latent, at its noise time"
        lines += ["", title, *_columns(result["by_way_of_the_latent"], titles=_WAY_TITLES)]
    if "t2l" in result:
        rows = result["t2l"]["by_t_latent"]
        lines += ["", "latents from texts by noise bin, in one pass", *_columns(rows, "t_latent")]
    if "interpolation" in result:
        rows, title = result["interpolation"]["by_way"], "texts between two documents, and the latents between theirs"
        lines += ["", title, *_columns(rows, titles=_BETWEEN_TITLES)]
    return "\n".join(lines)


def _section(title: str, rows: Iterable[Row], metrics: Mapping[str, Any]) -> list[str]:
    lines = [title]
    for name, key, baselines in rows:
        if key not in metrics:
            continue
        low_high = metrics.get(f"{key}_ci95")
        interval = f"{_number(low_high[0])} to {_number(low_high[1])}" if low_high else ""
        others = {label: key + other if other.startswith("_") else other for label, other in baselines.items()}
        baseline = ", ".join(
            f"{label} {_number(metrics[other])}" for label, other in others.items() if other in metrics
        )
        beside = f"baseline: {baseline}" if baseline else ""
        lines.append(f"  {name:<32}{_number(metrics[key]):>10}  {interval:<18}{beside}".rstrip())
    return lines


_TITLES = {
    "bits_per_token": "bits",
    "bits_per_token_shuffled": "shuffled",
    "bits_per_token_unigram": "unigram",
    "unigram_bits_per_token": "unigram",
    "bits_per_masked_token": "per masked token",
    "bits_per_masked_token_shuffled": "shuffled",
    "bits_of_bound": "of the bound",
    "cosine_shuffled": "shuffled",
    "cosine_mean_latent": "mean",
    "recall_at_1": "recall@1",
    "exact_match": "exact",
    "exact_match_ci95": "95 %",
}
_WAY_TITLES = {
    "latent_bits_per_token": "of the latent",
    "text_bits_per_token": "of the text",
    "bits_per_token": "together",
}
_BETWEEN_TITLES = {
    "trigram_bits_per_token": "trigram bits",
    "cosine_start": "cosine to the first",
    "cosine_start_given": "of the latent",
    "cosine_end": "to the last",
    "cosine_end_given": "of the latent",
}


def _columns(rows: Sequence[Mapping[str, Any]], time: str = "", titles: Mapping[str, str] = _TITLES) -> list[str]:
    """Format rows as right-aligned columns: the limits of each row's bin, its counts, and its metrics by `titles`."""
    names = [name for name in rows[0] if not name.endswith(("_from", "_to")) and name != "bits_per_token_ci95"]
    bounds = [name for name in rows[0] if name.endswith(("_from", "_to"))]
    cells = [[*([time or "tokens"] if bounds else []), *(titles.get(name, name) for name in names)]]
    for row in rows:
        cells.append(["-".join(_cell(name, row[name]) for name in bounds)] if bounds else [])
        cells[-1] += [_cell(name, row[name]) for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _cell(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_number, value))
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if name in ("t_latent", "t_from", "t_to") else _number(value)


def samples_markdown(result: Mapping[str, Any]) -> str:
    """Return `samples.md`: generations with their references, joint generations, edits and interpolations."""
    lines = [f"# Samples at step {result['step']}, {WEIGHTS_LABELS[result['weights']]}"]
    if "l2t" in result:
        lines += ["", "## Latent to text", ""]
    for pair in result.get("l2t", {}).get("samples", []):
        lines += [f"- reference:  `{_inline(pair['reference'])}`", f"  generation: `{_inline(pair['generation'])}`"]
    if "joint" in result:
        lines += ["", "## Joint: text and latent together, from noise", ""]
        lines += [f"- `{_inline(text)}`" for text in result["joint"]["samples"]]
    if "edit" in result:
        lines += ["", "## Edits: the words in brackets are generated again", ""]
    for pair in result.get("edit", {}).get("samples", []):
        lines += [f"- document: `{_inline(pair['edit'])}`", f"  edited:   `{_inline(pair['text'])}`"]
    if "interpolation" in result:
        lines += ["", "## From one document to another", ""]
        for texts in result["interpolation"]["samples"]:
            lines += [f"{'- ' if not place else '  '}`{_inline(text)}`  " for place, text in enumerate(texts)]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Escape `text` so that it stays one line of code in Markdown."""
    return " ".join(text.split()).replace("`", "'")
