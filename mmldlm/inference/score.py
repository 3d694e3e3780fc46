"""`mmldlm score RUN FILE --out OUT.jsonl`: bound the likelihood of each text of a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import DataError
from mmldlm.evaluation import BITS
from mmldlm.inference import batch
from mmldlm.inference.generate import prefix_tokens
from mmldlm.inference.model import check_scored_mode, draw_bounds
from mmldlm.loading.load import add_run_options, add_settings
from mmldlm.prepare.documents import Problem
from mmldlm.utils.intervals import Ratio, mean_of_draws, ratio_of_sums


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("mmldlm score", description="Bound the negative log-likelihood of each text.")
    add_run_options(parser)
    parser.add_argument("texts", type=Path, metavar="FILE", help="a text per line, or .jsonl with `text`")
    add_settings(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="OUT.jsonl", help="a line for each text")
    parser.add_argument(
        "--latents",
        metavar="own|FILE.npy",
        help="score given the encoder's latents, or these; default: without",
    )
    parser.add_argument("--draws", type=int, default=16, help="noise times per text; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    batch.add_batch_options(parser)
    options = parser.parse_intermixed_args(argv)
    if options.draws < 1:
        parser.error(f"--draws: expected at least 1, found {options.draws}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run `mmldlm score` and return the exit code."""
    options = _parse(argv)
    draws, size = options.draws, options.batch
    with batch.batch_processes(options) as (run, processes, progress):
        check_scored_mode(run, options.latents is not None)
        items = batch.read_items(options.texts, run)
        latent_file = Path(options.latents) if options.latents not in (None, "own") else None
        latents = batch.encode_with(run) if options.latents == "own" else None
        if latent_file is not None:
            rows, latents = batch.read_rows(latent_file, run)
            if len(rows) != len(items):
                raise DataError(f"{latent_file}: {len(rows)} latents, expected one for each of {len(items)} texts")
            items = [row if isinstance(row, Problem) else item for item, row in zip(items, rows, strict=True)]

        def compute(indices: list[int], texts: list[str], latents: np.ndarray | None) -> batch.Results:
            tokens = run.tokenizer.encode_batch(texts)
            prefixes = prefix_tokens(run, [getattr(items[index], "prefix", "") for index in indices], len(indices))
            whole = [[*prefix, *text] for prefix, text in zip(prefixes, tokens, strict=True)]
            bounds = draw_bounds(run, whole, latents, indices, options.seed, draws)
            means = [(len(text), mean_of_draws(nats)) for text, nats in zip(tokens, bounds.T, strict=True)]
            return [
                {"tokens": count, "nats": mean.value, **_bits_per_token(mean * (1 / count))} for count, mean in means
            ], None

        request = {
            "command": "score",
            **batch.describe(run, options, options.texts, latent_file),
            "latents": options.latents and ("given" if latent_file else "own"),
            **{name: getattr(options, name) for name in ("draws", "seed", "batch")},
        }
        job = batch.Job(options.out, request, items, size, options.on_problem == "skip", latents)
        batch.run_batches(job, compute, processes, progress)
        if processes.is_main:
            scored = [(record["nats"], record["tokens"]) for record in job.records() if "nats" in record]
            nats, tokens = np.array(scored, np.float64).reshape(-1, 2).T
            total = {"tokens": int(tokens.sum()), "nats": float(nats.sum())}
            if scored:
                total |= _bits_per_token(ratio_of_sums(nats, tokens))
                print(f"bits per token: {total['bits_per_token']:.3f}, 95 % interval {total['bits_per_token_ci95']}")
            job.finish(**total)
    return 0


def _bits_per_token(nats: Ratio) -> dict[str, Any]:
    """Convert nats per token to bits, with the interval over the draws of a text, or over texts."""
    bits = nats * BITS
    return {
        "bits_per_token": bits.value,
        "bits_per_token_ci95": None if bits.no_interval_reason else [round(bound, 6) for bound in bits.interval],
    }
