"""What people read of an evaluation: a table with the control beside each value, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmldlm.optim.ema import WORDS

# (name, key, controls by label); a key ending in `_ci95` in place of `key` has the interval.
Row = tuple[str, str, dict[str, str]]

_TEXT: list[Row] = [
    ("bits per token", "bits_per_token", {"unigram": "unigram_bits_per_token"}),
    ("bits per character", "bits_per_character", {"unigram": "unigram_bits_per_character"}),
]
_SUFFIXES = {"shuffled": "_shuffled", "mean": "_mean_latent", "unigram": "_unigram"}


def _of_l2t(name: str, key: str, upper: bool = False) -> Row:
    controls = {label: key + suffix for label, suffix in _SUFFIXES.items()}
    return name, key, controls | ({"references": f"{key}_true"} if upper else {})


_L2T: list[Row] = [
    _of_l2t("bits per token given the latent", "bits_per_token"),
    _of_l2t("token accuracy", "token_accuracy"),
    _of_l2t("exact match", "exact_match"),
    _of_l2t("BLEU", "bleu"),
    _of_l2t("chrF", "chrf"),
    _of_l2t("re-encoded cosine", "reencoded_cosine", upper=True),
]
_T2L: list[Row] = [
    ("cosine", "cosine", {"mean": "cosine_mean_latent", "shuffled": "cosine_shuffled"}),
    ("recall@1", "recall_at_1", {"chance": "recall_at_1_chance"}),
    ("recall@10", "recall_at_10", {"chance": "recall_at_10_chance"}),
    ("median rank", "median_rank", {"chance": "median_rank_chance"}),
    ("STS Spearman", "sts_spearman", {"shuffled": "sts_spearman_shuffled", "encoder": "sts_spearman_encoder"}),
]
_REAL = {"held-out": "_true", "unigram": "_unigram"}
_JOINT: list[Row] = [
    *(
        (name, key, {label: key + suffix for label, suffix in _REAL.items()})
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
]


def table(result: Mapping[str, Any]) -> str:
    """The metrics beside their controls, then the bound by length, and bound and latents by noise level."""
    what = f"step {result['step']}, {WORDS[result['weights']]}"
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
    for title, found in (("text alone", result), ("given the latent", result.get("l2t", {}))):
        if "by_length" in found:
            lines += ["", f"bits per token by length, {title}", *_rows(_lengths(found["by_length"]))]
            lines += ["", f"bits by noise level, {title}", *_rows(_levels("t_text", found["by_t_text"]))]
    if "t2l" in result:
        rows = result["t2l"]["by_t_latent"]
        lines += ["", "latents from texts by noise level, in one pass", *_rows(_levels("t_latent", rows))]
    return "\n".join(lines)


def _section(title: str, rows: Iterable[Row], found: Mapping[str, Any]) -> list[str]:
    lines = [title]
    for name, key, controls in rows:
        if key not in found:
            continue
        low_high = found.get(f"{key}_ci95")
        interval = f"{number(low_high[0])} to {number(low_high[1])}" if low_high else ""
        beside = ", ".join(
            f"{label} {number(found[control])}" for label, control in controls.items() if control in found
        )
        lines.append(f"  {name:<32}{number(found[key]):>10}  {interval:<18}control: {beside}")
    return lines


def _lengths(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = [name for name in rows[0] if name not in ("tokens_from", "tokens_to", "documents", "bits_per_token_ci95")]
    head = ["tokens", "documents", *(_label(name) for name in names)]
    return [head] + [
        [f"{row['tokens_from']}-{row['tokens_to']}", str(row["documents"]), *(number(row[name]) for name in names)]
        for row in rows
    ]


def _levels(time: str, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = [name for name in rows[0] if name not in ("t_from", "t_to", "draws")]
    head = [time, "draws", *(_label(name) for name in names)]
    return [head] + [
        [f"{row['t_from']:.1f}-{row['t_to']:.1f}", str(row["draws"]), *(number(row[name]) for name in names)]
        for row in rows
    ]


def _label(key: str) -> str:
    shown = {
        "bits_per_token": "bits",
        "bits_per_token_shuffled": "shuffled",
        "bits_per_token_unigram": "unigram",
        "unigram_bits_per_token": "unigram",
        "bits_per_masked_token": "a masked token",
        "bits_per_masked_token_shuffled": "shuffled",
        "bits_of_bound": "of the bound",
        "cosine": "cosine",
        "cosine_shuffled": "shuffled",
        "cosine_mean_latent": "mean",
        "recall_at_1": "recall@1",
    }
    return shown[key]


def _rows(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def samples_markdown(result: Mapping[str, Any]) -> str:
    """`samples.md`: references beside generations, and texts of the model's own."""
    lines = [f"# Samples at step {result['step']}, {WORDS[result['weights']]}"]
    if "l2t" in result:
        lines += ["", "## Latent to text", ""]
    for pair in result.get("l2t", {}).get("samples", []):
        lines += [f"- reference:  `{_inline(pair['reference'])}`", f"  generation: `{_inline(pair['generation'])}`"]
    if "joint" in result:
        lines += ["", "## Joint: text and latent together, from noise", ""]
        lines += [f"- `{_inline(text)}`" for text in result["joint"]["samples"]]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Text that stays one line of code in Markdown."""
    return " ".join(text.split()).replace("`", "'")
