"""Quality of generated texts by decoding, reverse steps and temperature, on trained runs.

    python -m benchmarks decoding NAME=RUN [...] [--texts 200] [--steps 8 20 64] [--temperatures 0 0.6 1]

For each run, shown under its name: l2t texts of held-out documents' latents against the documents, and joint texts by
their diversity. The defaults of `sampling.decoding` follow from these tables. Every row has the same documents and
random streams.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from benchmarks.common.report import RESULTS, circumstances, markdown, positive, print_status, write_json
from mmldlm.diffusion.masked import TextDecoding
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.joint import diversity_metrics, frechet_metrics
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.run.load import LoadedRun, load_run

VARIETY = ("token_entropy", "distinct_2", "repetition_4")


def text_rows(evaluation: Evaluation, settings: Sequence[SamplingConfig]) -> list[dict[str, Any]]:
    """Return rows of l2t, one for each of `settings`."""
    count = evaluation.num_texts
    tokens, truth = evaluation.tokens[:count], evaluation.raw_latents[:count]
    references, rows = evaluation.decode(tokens), []
    for config in settings:
        generated = evaluation.generate("l2t", "own", count, config).tokens
        texts = evaluation.decode(generated)
        measured = reference_metrics(generated, texts, tokens, references)
        measured |= reencoding_metrics(evaluation.encode(texts), truth)
        names = ("bleu", "chrf", "exact_match", "token_accuracy", "reencoded_cosine")
        rows.append(_settings(config) | {name: measured[name] for name in names})
    return rows


def joint_rows(evaluation: Evaluation, settings: Sequence[SamplingConfig]) -> list[dict[str, Any]]:
    """Return rows of joint; the first has the held-out documents themselves."""
    count = evaluation.num_texts

    def row(tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        metrics = diversity_metrics(tokens)
        return {name: metrics[name] for name in VARIETY}

    nothing = {"frechet_distance": None, "reencoded_cosine": None}
    rows = [
        {"decoding": "held out", "steps": "", "temperature": ""} | row(evaluation.tokens[:count]) | nothing,
    ]
    for config in settings:
        generated = evaluation.generate("joint", "none", count, config)
        raw = evaluation.run.store.restore(generated.latents)
        encoded = evaluation.encode(evaluation.decode(generated.tokens))
        measured = {
            "frechet_distance": frechet_metrics(evaluation, generated.latents)["frechet_distance"],
            "reencoded_cosine": reencoding_metrics(encoded, raw)["reencoded_cosine"],
        }
        rows.append(_settings(config) | row(generated.tokens) | measured)
    return rows


def _settings(config: SamplingConfig) -> dict[str, Any]:
    return {"decoding": config.decoding, "steps": config.steps, "temperature": config.temperature}


def tables_of(
    name: str, run: LoadedRun, texts: int, settings: Sequence[SamplingConfig]
) -> dict[str, list[dict[str, Any]]]:
    """Return l2t and joint tables of a run, on its test split."""
    evaluation = Evaluation(run, EvaluationConfig(samples=2 * texts, texts=texts))
    tables = {}
    for title, measure in ((f"l2t, {name}", text_rows), (f"joint, {name}", joint_rows)):
        print_status(title)
        tables[title] = measure(evaluation, settings)
    return tables


def _named(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN, found {text!r}")
    return name, Path(folder)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """Markdown tables by name, for `benchmarks.pages`."""
    return {
        "decoding": "\n\n".join(f"{title}:\n\n{markdown(rows)}" for title, rows in result["tables"].items()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mmldlm bench decoding", description="Quality of texts by decoding.")
    parser.add_argument("runs", nargs="+", type=_named, metavar="NAME=RUN", help="run folders, and what to call them")
    parser.add_argument("--texts", type=positive, default=200, help="of each row (%(default)s)")
    parser.add_argument("--steps", type=positive, nargs="+", default=[8, 20, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of decoding.json")
    options = parser.parse_args(argv)
    settings = [
        SamplingConfig(steps=steps, temperature=temperature, decoding=decoding)
        for decoding, steps, temperature in product(get_args(TextDecoding), options.steps, options.temperatures)
    ]
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, folder in options.runs:
        run = load_run(folder)
        tables |= tables_of(name, run, options.texts, settings)
    write_json(
        {"benchmark": "decoding", "texts": options.texts, **circumstances(run.device), "tables": tables},
        options.out,
        "decoding",
    )
    print("\n\n".join(f"{title}\n\n{markdown(rows)}" for title, rows in tables.items()))
    return 0
