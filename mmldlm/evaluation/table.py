"""Readable results of an evaluation: a table with the baselines next to each value, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mmldlm.optim.ema import WEIGHTS_LABELS
from mmldlm.utils.format import format_number

# (name, key, keys of the baselines by label). The key with `_ci95` appended, if there is one, has the interval.
Row = tuple[str, str, dict[str, str]]

_number = partial(format_number, decimals=3)

_LIKELIHOOD: list[Row] = [
    ("  without similar documents", "bits_per_token_novel", {"all": "bits_per_token"}),
    ("  exact, by confidence", "bits_per_token_by_confidence", {"bound": "bits_per_token_by_confidence_bound"}),
]
_TEXT: list[Row] = [
    ("bits per token", "bits_per_token", {"unigram": "unigram_bits_per_token"}),
    ("bits per character", "bits_per_character", {"unigram": "unigram_bits_per_character"}),
    *_LIKELIHOOD,
    (
        "bits per token with length",
        "bits_per_token_with_length",
        {"unigram": "unigram_bits_per_token_with_length"},
    ),
]
_SUFFIXES = {"shuffled": "_shuffled", "mean": "_mean_latent", "unigram": "_unigram"}


def _l2t_row(name: str, key: str, upper_bound: bool = False) -> Row:
    baselines = {label: key + suffix for label, suffix in _SUFFIXES.items()}
    return name, key, baselines | ({"references": f"{key}_true"} if upper_bound else {})


_MEMORIZATION: list[Row] = [
    ("similarity to training text", "training_similarity", {"held-out": "training_similarity_true"}),
    ("copies of training texts", "training_copies", {"held-out": "training_copies_true"}),
]
_L2T: list[Row] = [
    (
        "bits per token given the latent",
        "bits_per_token",
        {
            **{label: f"bits_per_token{suffix}" for label, suffix in _SUFFIXES.items()},
            "bag of words": "bits_per_token_bag_of_words",
        },
    ),
    *_LIKELIHOOD,
    _l2t_row("token accuracy", "token_accuracy"),
    _l2t_row("exact match", "exact_match"),
    _l2t_row("BLEU", "bleu"),
    _l2t_row("chrF", "chrf"),
    _l2t_row("re-encoded cosine", "reencoded_cosine", upper_bound=True),
    *_MEMORIZATION,
]
_T2L: list[Row] = [
    ("cosine", "cosine", {"mean": "cosine_mean_latent", "shuffled": "cosine_shuffled", "ridge": "cosine_ridge"}),
    ("recall@1", "recall_at_1", {"chance": "recall_at_1_chance", "ridge": "recall_at_1_ridge"}),
    ("recall@10", "recall_at_10", {"chance": "recall_at_10_chance", "ridge": "recall_at_10_ridge"}),
    ("median rank", "median_rank", {"chance": "median_rank_chance", "ridge": "median_rank_ridge"}),
    ("STS Spearman", "sts_spearman", {"shuffled": "sts_spearman_shuffled", "encoder": "sts_spearman_encoder"}),
]
_JOINT_SUFFIXES = {"held-out": "_true", "unigram": "_unigram"}
_JOINT: list[Row] = [
    *(
        (name, key, {label: key + suffix for label, suffix in _JOINT_SUFFIXES.items()})
        for name, key in (
            ("generative perplexity", "generative_perplexity"),
            ("token entropy (bits)", "token_entropy"),
            ("distinct-1", "distinct_1"),
            ("distinct-2", "distinct_2"),
            ("distinct-3", "distinct_3"),
            ("repetition (4-grams)", "repetition_4"),
        )
    ),
    (
        "latent Frechet distance",
        "frechet_distance",
        {"held-out": "frechet_distance_true", "noise": "frechet_distance_noise"},
    ),
    ("re-encoded cosine", "reencoded_cosine", {"shuffled": "reencoded_cosine_shuffled"}),
    *_MEMORIZATION,
]


def table(result: Mapping[str, Any]) -> str:
    """Return the results of `evaluate` as text: metrics with baselines, then bounds by length and by noise bin."""
    what = f"step {result['step']}, {WEIGHTS_LABELS[result['weights']]}"
    lines = [f"{what}: {result['documents']} documents of split {result['split']}"]
    if "bits_per_token" in result:
        lines += _section("text alone", _TEXT, {**result, **result["controls"]})
    for mode, title, rows in (
        ("l2t", "l2t: {texts} texts from latents", _L2T),
        ("t2l", "t2l: latents from texts, {candidates} candidates", _T2L),
        ("joint", "joint: {texts} texts and latents from noise", _JOINT),
    ):
        if mode in result:
            lines += _section(title.format(**result[mode]), rows, result[mode])
    joint = result.get("joint", {})
    if joint and joint["frechet_distance"] is None:
        lines.append(f"  the Frechet distance needs --texts {joint['frechet_samples_needed']} or more")
    for title, metrics in (("text alone", result), ("given the latent", result.get("l2t", {}))):
        if "exact_match_by_length" in metrics:
            lines += ["", "exact matches by length", *_align(_exact_match_cells(metrics["exact_match_by_length"]))]
        if "by_length" in metrics:
            lines += ["", f"bits per token by length, {title}", *_align(_length_cells(metrics["by_length"]))]
            lines += ["", f"bits by noise bin, {title}", *_align(_noise_bin_cells("t_text", metrics["by_t_text"]))]
    if "by_way_of_the_latent" in result:
        rows = result["by_way_of_the_latent"]
        lines += ["", "bits per token by way of the latent, at its noise time", *_align(_latent_cells(rows))]
    if "t2l" in result:
        rows = result["t2l"]["by_t_latent"]
        lines += ["", "latents from texts by noise bin, in one pass", *_align(_noise_bin_cells("t_latent", rows))]
    for mode, rows in result.get("by_steps", {}).items():
        lines += ["", f"{mode} by reverse steps", *_align(_steps_cells(rows))]
    return "\n".join(lines)


def _section(title: str, rows: Iterable[Row], metrics: Mapping[str, Any]) -> list[str]:
    lines = [title]
    for name, key, baselines in rows:
        if key not in metrics:
            continue
        low_high = metrics.get(f"{key}_ci95")
        interval = f"{_number(low_high[0])} to {_number(low_high[1])}" if low_high else ""
        baseline = ", ".join(
            f"{label} {_number(metrics[other])}" for label, other in baselines.items() if other in metrics
        )
        lines.append(f"  {name:<32}{_number(metrics[key]):>10}  {interval:<18}baseline: {baseline}")
    return lines


def _length_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = [name for name in rows[0] if name not in ("tokens_from", "tokens_to", "documents", "bits_per_token_ci95")]
    head = ["tokens", "documents", *(_column_title(name) for name in names)]
    return [head] + [
        [f"{row['tokens_from']}-{row['tokens_to']}", str(row["documents"]), *(_number(row[name]) for name in names)]
        for row in rows
    ]


def _exact_match_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [["tokens", "texts", "exact", "95 %"]] + [
        [
            f"{row['tokens_from']}-{row['tokens_to']}",
            str(row["texts"]),
            _number(row["exact_match"]),
            " to ".join(map(_number, row["exact_match_ci95"])),
        ]
        for row in rows
    ]


def _latent_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    keys = ("latent_bits_per_token", "text_bits_per_token", "bits_per_token")
    head = ["t_latent", "of the latent", "of the text", "together"]
    return [head] + [[f"{row['t_latent']:.1f}", *(_number(row[key]) for key in keys)] for row in rows]


def _steps_cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    head = [name.replace("_", " ") for name in rows[0]]
    return [head] + [[str(row["steps"]), *(_number(row[name]) for name in list(row)[1:])] for row in rows]


def _noise_bin_cells(time: str, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = [name for name in rows[0] if name not in ("t_from", "t_to", "draws")]
    head = [time, "draws", *(_column_title(name) for name in names)]
    return [head] + [
        [f"{row['t_from']:.1f}-{row['t_to']:.1f}", str(row["draws"]), *(_number(row[name]) for name in names)]
        for row in rows
    ]


def _column_title(key: str) -> str:
    titles = {
        "bits_per_token": "bits",
        "bits_per_token_shuffled": "shuffled",
        "bits_per_token_unigram": "unigram",
        "unigram_bits_per_token": "unigram",
        "bits_per_masked_token": "per masked token",
        "bits_per_masked_token_shuffled": "shuffled",
        "bits_of_bound": "of the bound",
        "cosine": "cosine",
        "cosine_shuffled": "shuffled",
        "cosine_mean_latent": "mean",
        "recall_at_1": "recall@1",
    }
    return titles[key]


def _align(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of right-aligned columns."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def samples_markdown(result: Mapping[str, Any]) -> str:
    """Return `samples.md`: generations with their references, and joint generations."""
    lines = [f"# Samples at step {result['step']}, {WEIGHTS_LABELS[result['weights']]}"]
    if "l2t" in result:
        lines += ["", "## Latent to text", ""]
    for pair in result.get("l2t", {}).get("samples", []):
        lines += [f"- reference:  `{_inline(pair['reference'])}`", f"  generation: `{_inline(pair['generation'])}`"]
    if "joint" in result:
        lines += ["", "## Joint: text and latent together, from noise", ""]
        lines += [f"- `{_inline(text)}`" for text in result["joint"]["samples"]]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Return `text` such that it remains one line of code in Markdown."""
    return " ".join(text.split()).replace("`", "'")
