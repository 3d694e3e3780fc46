"""Measure a run on held-out documents: `mmldlm evaluate RUN`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmldlm.build import LoadedRun, load_run
from mmldlm.data.encoders import load_encoder
from mmldlm.diffusion.noise import trained_modes
from mmldlm.ema import WORDS, add_weights_option
from mmldlm.evaluation import (
    Evaluation,
    EvaluationConfig,
    joint_samples,
    latent_metrics,
    likelihood,
    text_metrics,
)


def evaluate(run: LoadedRun, config: EvaluationConfig) -> dict[str, Any]:
    """All metrics, nested as they go into `evaluation.json`."""
    evaluation = Evaluation(run, config)
    encoder = load_encoder(run.store.path / "encoder")
    trained = trained_modes(run.config.mode, run.config.mode_schedule)
    with tqdm(total=9, disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        result = {"step": run.step, "weights": run.weights, **asdict(config), **likelihood(evaluation, progress)}
        result["l2t"] |= text_metrics(evaluation, encoder, progress)
        result["t2l"] = latent_metrics(evaluation, progress)
        if "joint" in trained:
            result["joint"] = {"samples": joint_samples(evaluation, min(10, len(evaluation.ids)), progress)}
    result["modes_trained"] = list(trained)
    return result


def finite(value: Any) -> Any:
    """The same, with None for numbers that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(result: dict[str, Any]) -> str:
    """The metrics beside their controls, for people."""
    l2t, t2l, controls = result["l2t"], result["t2l"], result["controls"]
    rows = [
        ("bits per token", result["bits_per_token"], f"unigram {controls['unigram_bits_per_token']:.3f}"),
        ("bits per character", result["bits_per_character"], f"unigram {controls['unigram_bits_per_character']:.3f}"),
        (
            "bits per token given the latent",
            l2t["bits_per_token"],
            f"shuffled {l2t['bits_per_token_shuffled']:.3f}, mean {l2t['bits_per_token_mean_latent']:.3f}",
        ),
    ]
    for name, key in (
        ("token accuracy", "token_accuracy"),
        ("BLEU", "bleu"),
        ("re-encoded cosine", "reencoded_cosine"),
    ):
        controls_of = ", ".join(
            f"{label} {_number(l2t[key + suffix])}"
            for label, suffix in (("shuffled", "_shuffled"), ("mean", "_mean_latent"))
        )
        rows.append((f"l2t {name}", l2t[key], controls_of))
    chance = t2l["recall_at_1_chance"]
    rows += [
        (
            "t2l cosine",
            t2l["cosine"],
            f"mean latent {t2l['cosine_mean_latent']:.3f}, shuffled {t2l['cosine_shuffled']:.3f}",
        ),
        ("t2l recall@1", t2l["recall_at_1"], f"chance {chance:.4f} ({t2l['candidates']} candidates)"),
        ("t2l recall@10", t2l["recall_at_10"], f"chance {10 * chance:.4f}"),
    ]
    what = f"step {result['step']}, {WORDS[result['weights']]}"
    lines = [f"{what}: {result['samples']} documents of split {result['split']}"]
    lines += [f"  {name:<34}{_number(value):>9}   control: {control}" for name, value, control in rows]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def samples_markdown(result: dict[str, Any]) -> str:
    """`samples.md`: references beside generations, and texts of the model's own."""
    lines = [f"# Samples at step {result['step']}, {WORDS[result['weights']]}", "", "## Latent to text", ""]
    for pair in result["l2t"]["samples"]:
        lines += [f"- reference:  `{_inline(pair['reference'])}`", f"  generation: `{_inline(pair['generation'])}`"]
    if "joint" in result:
        lines += ["", "## Joint: text and latent together, from noise", ""]
        lines += [f"- `{_inline(text)}`" for text in result["joint"]["samples"]]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Text that stays one line of code in Markdown."""
    return " ".join(text.split()).replace("`", "'")


def main(argv: list[str] | None = None) -> int:
    defaults = EvaluationConfig()
    parser = argparse.ArgumentParser(prog="mmldlm evaluate", description="Measure a run on held-out documents.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint's folder; default: the newest good one")
    parser.add_argument("--data", help="data store, where it is no longer at the config's data.path")
    add_weights_option(parser)
    parser.add_argument("--split", default=defaults.split, help="default: %(default)s")
    for name, what in (
        ("samples", "documents of the bound, candidates of the retrieval"),
        ("texts", "documents to write from their latents"),
        ("times", "noise times a document"),
        ("seed", "of documents, noise and generation"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(defaults, name), help=f"{what}; default: %(default)s"
        )
    options = parser.parse_args(argv)
    for name in ("samples", "texts", "times"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, found {getattr(options, name)}")
    run = load_run(options.run, options.checkpoint, options.data, options.weights)
    config = EvaluationConfig(options.split, options.samples, options.texts, options.times, options.seed)
    result = evaluate(run, config)
    (options.run / "samples.md").write_text(samples_markdown(result), encoding="utf-8")
    (options.run / "evaluation.json").write_text(
        json.dumps(finite(result), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    print(table(result))
    print(f"written: {options.run / 'evaluation.json'}, {options.run / 'samples.md'}")
    return 0
