"""Do the latents of encoders say which sentences mean the same, and can the sentences be read from them?

    python -m benchmarks meaning learned=STORE,RUN "learned, with a teacher"=STORE,RUN minilm=STORE

For the encoder of each store: recall@1 and Spearman's correlation on `data/meaning.tsv`. From the run's
`evaluation.json`: the texts that it generates from held-out latents. The file has 120 sentences on the subjects of the
embedded corpora, each with a paraphrase that has few of its words (score 2), a sentence of the same words with another
meaning (1), and another one's paraphrase (0). They were written for this purpose, so no store is trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import RESULTS, ROOT, circumstances, markdown, plain_parser, write_json
from mmldlm.data.encoders import load_encoder
from mmldlm.data.encoders.lsa import tfidf
from mmldlm.data.nearest import unit_vectors
from mmldlm.data.store import Store
from mmldlm.errors import UsageError
from mmldlm.evaluation.sts import read_pairs, similarity_metrics

PAIRS = ROOT / "benchmarks" / "data" / "meaning.tsv"
_READ = ("exact_match", "exact_match_ci95", "bleu")  # of the texts generated from latents


def measure(named: Mapping[str, tuple[Path, Path | None]]) -> dict[str, Any]:
    """Return a row of metrics for TF-IDF and each named encoder, given by its store and perhaps a run."""
    pairs = read_pairs(PAIRS)
    sentences = list(dict.fromkeys(text for pair in pairs for text in pair[:2]))
    rows: dict[str, Any] = {"TF-IDF": similarity_metrics(tfidf(sentences), sentences, pairs)}
    for name, (store, run) in named.items():
        compared = Store.open(store).manifest.compared
        vectors = unit_vectors(load_encoder(store / "encoder").encode(sentences)[:, compared])
        rows[name] = similarity_metrics(torch.from_numpy(vectors), sentences, pairs)
        if run is not None:
            l2t = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["l2t"]
            rows[name] |= {metric: l2t[metric] for metric in _READ}
    return rows


def meaning_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each encoder."""
    rows = []
    for name, metrics in result["rows"].items():
        low, high = metrics["sts_recall_at_1_ci95"]
        row = {"vectors of a text": name, "recall@1 of paraphrases": f"{metrics['sts_recall_at_1']:.2f}"}
        row["95 %"] = f"{low:.2f} to {high:.2f}"
        row["Spearman"] = f"{metrics['sts_spearman']:.2f}"
        read = "exact_match" in metrics
        row["exact texts from latents"] = f"{metrics['exact_match']:.2f}" if read else "-"
        row["BLEU"] = f"{metrics['bleu']:.1f}" if read else "-"
        rows.append(row)
    return {"meaning": markdown(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("meaning", "Which encoders know what sentences mean the same.")
    parser.add_argument("encoders", nargs="+", metavar="NAME=STORE[,RUN]", help="name of the row, and where it is from")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of meaning.json (%(default)s)")
    options = parser.parse_args(argv)
    named: dict[str, tuple[Path, Path | None]] = {}
    for given in options.encoders:
        name, _, paths = given.partition("=")
        store, _, run = paths.partition(",")
        if not store:
            raise UsageError(f"meaning: expected NAME=STORE or NAME=STORE,RUN, found {given!r}")
        named[name] = Path(store), Path(run) if run else None
    result = {"benchmark": "meaning", **circumstances(torch.device("cpu")), "rows": measure(named)}
    write_json(result, options.out, "meaning")
    print(meaning_blocks(result)["meaning"])
    return 0
