"""Do the latents of encoders say which sentences mean the same, and can the sentences be read from them?

    python -m benchmarks meaning learned=STORE,simple-docs "learned, with a teacher"=STORE lsa=STORE,simple-docs-lsa

For the encoder of each store: recall@1 and Spearman's correlation on `data/meaning.tsv`. From the case of the learning
gate: how well held-out texts are generated from such latents. The file has 120 sentences on the subjects of the
embedded corpora, each with a paraphrase that has few of its words (score 2), a sentence of the same words with another
meaning (1), and another one's paraphrase (0). They were written for this purpose, so no store is trained on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import RESULTS, circumstances, markdown, plain_parser, read_result, write_json
from benchmarks.learning import CASES, PAIRS
from mmldlm.data.encoders import load_encoder
from mmldlm.data.encoders.lsa import tfidf
from mmldlm.data.nearest import unit_vectors
from mmldlm.data.store import Store
from mmldlm.errors import UsageError
from mmldlm.evaluation.sts import read_pairs, similarity_metrics


def measure(named: Mapping[str, tuple[Path, str]]) -> dict[str, Any]:
    """Return a row of metrics for TF-IDF and each encoder, named with its store and its case of the gate or ""."""
    pairs = read_pairs(PAIRS)
    sentences = list(dict.fromkeys(text for pair in pairs for text in pair[:2]))
    rows: dict[str, Any] = {"TF-IDF": similarity_metrics(tfidf(sentences), sentences, pairs)}
    for name, (store, case) in named.items():
        compared = Store.open(store).manifest.compared
        vectors = unit_vectors(load_encoder(store / "encoder").encode(sentences)[:, compared])
        rows[name] = {"case": case, **similarity_metrics(torch.from_numpy(vectors), sentences, pairs)}
    return rows


def meaning_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each encoder, with medians over the seeds of the learning gate."""
    gate, rows = read_result("learning")["corpora"], []
    for name, metrics in result["rows"].items():
        low, high = metrics["sts_recall_at_1_ci95"]
        row = {"vectors of a text": name, "recall@1 of paraphrases": f"{metrics['sts_recall_at_1']:.2f}"}
        row["95 %"] = f"{low:.2f} to {high:.2f}"
        row["Spearman"] = f"{metrics['sts_spearman']:.2f}"
        runs = [seed["metrics"] for seed in gate[metrics["case"]]["seeds"]] if metrics.get("case") else []
        found = [run["t2l"]["sts_recall_at_1"] for run in runs if "sts_recall_at_1" in run["t2l"]]
        row["recall@1 by t2l"] = f"{median(found):.2f}" if found else "-"
        row["exact texts from latents"] = f"{median(run['l2t']['exact_match'] for run in runs):.2f}" if runs else "-"
        row["BLEU"] = f"{median(run['l2t']['bleu'] for run in runs):.1f}" if runs else "-"
        rows.append(row)
    return {"meaning": markdown(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("meaning", "Which encoders know what sentences mean the same.")
    parser.add_argument("encoders", nargs="+", metavar="NAME=STORE[,CASE]", help="row, store, and case of the gate")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of meaning.json (%(default)s)")
    options = parser.parse_args(argv)
    named: dict[str, tuple[Path, str]] = {}
    for given in options.encoders:
        name, _, paths = given.partition("=")
        store, _, case = paths.partition(",")
        if not store or case not in ("", *CASES):
            raise UsageError(
                f"meaning: expected NAME=STORE,CASE, CASE one of {', '.join(CASES)} or none, found {given!r}"
            )
        named[name] = Path(store), case
    result = {"benchmark": "meaning", **circumstances(torch.device("cpu")), "rows": measure(named)}
    write_json(result, options.out, "meaning")
    print(meaning_blocks(result)["meaning"])
    return 0
