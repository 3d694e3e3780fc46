"""Tables of answered questions. The commands that measured them are at commit b9e36f0e."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.common.report import RESULTS, markdown, median_with_range
from mmldlm.evaluation.likelihood import MAX_ORDERED_TOKENS, SHORT

DECODINGS = ("greedy", "beam of 4", "nearest of 5 beams")  # how the reference decoder was decoded
ROWS = {
    "bits per token, with the end or length": "bits_per_token_with_length",
    "the same of texts up to 64 tokens": f"bits_per_token_with_length{SHORT}",
    "exact matches": "exact_match",
    "BLEU": "bleu",
    "chrF": "chrf",
    "cosine of a text's latent to the given one": "reencoded_cosine",
    "texts with a doubled word": "doubled_words",
    "CPU ms per text": "cpu_ms_per_text",
    "CPU minutes of training": "train_cpu_minutes",
    "million parameters": "million_parameters",
}


def our_value(seed: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of `ROWS` for a run of the learning gate, or None if the gate has none.

    Like the decoder's bits, ours are exact, not the bound: we add up the tokens one by one in the order of decoding.
    The gate has them for all texts if none is longer than `MAX_ORDERED_TOKENS`. Otherwise, they are in `runs`.
    """
    l2t, train_cpu_s = seed["metrics"]["l2t"], seed["train_cpu_s"]  # None if an earlier start was killed
    if metric == "train_cpu_minutes":
        return train_cpu_s and train_cpu_s / 60
    if metric == "bits_per_token_with_length":
        are_all = l2t["exact_match_by_length"][-1]["tokens_to"] <= MAX_ORDERED_TOKENS
        return l2t[f"bits_per_token_by_confidence{SHORT}"] + l2t["length_bits_per_token"] if are_all else None
    return l2t.get(metric)


def reference_decoder_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a table for each corpus, medians over the seeds with their range, beside the gate's."""
    gate, made = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))["corpora"], {}
    for name, corpus in result["corpora"].items():
        rows, ours = list[dict[str, str]](), gate[name]["seeds"]
        decodings = [decoding for decoding in DECODINGS if decoding in corpus["seeds"][0]]
        for title, metric in ROWS.items():
            row = {f"`{name}`, seeds: {len(corpus['seeds'])}": title}
            for decoding in decodings:
                row[decoding] = median_with_range([(seed | seed[decoding]).get(metric) for seed in corpus["seeds"]])
            measured = [run[metric] for run in corpus.get("runs", []) if metric in run]
            row[f"mmldlm, seeds: {len(ours)}"] = median_with_range(
                measured or [our_value(seed, metric) for seed in ours]
            )
            if measured:
                row[f"mmldlm, seeds: {len(ours)}"] += f" (seeds: {len(measured)})"
            if any(cell != "-" for cell in [*row.values()][1:]):
                rows.append(row)
        made[f"reference-decoder-{name}"] = markdown(rows)
    return made


def search_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each way to spend passes."""
    rows = []
    for name, arm in result["arms"].items():
        low, high = arm["exact_match_ci95"]
        row = {f"{arm['texts']} held-out texts": name, "passes a text": f"{arm['passes_per_text']:.0f}"}
        row |= {"CPU ms": f"{arm['cpu_ms_per_text']:.0f}"}
        row |= {"exact matches": f"{arm['exact_match']:.3f} ({low:.3f} to {high:.3f})", "BLEU": f"{arm['bleu']:.1f}"}
        cosine = arm["reencoded_cosine"]  # null if the encoder has no latent for any of the texts
        rows.append(row | {"cosine to the latent": "-" if cosine is None else f"{cosine:.3f}"})
    return {"search": markdown(rows)}
