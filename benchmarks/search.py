"""What a search for the text of a latent brings, for its passes of the network.

    python -m benchmarks search RUN [--data STORE]

All documents of the split test, on one thread: by budgets of `sampling.search`, beside more reverse steps with as many
passes, and beside a search that an encoder of other texts directs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import RESULTS, circumstances, markdown, plain_parser, print_status, write_json
from mmldlm.data.encoders import LatentEncoder
from mmldlm.diffusion.candidates import TextRequest, generate_best
from mmldlm.diffusion.noise import SampleStreams
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.run.load import LoadedRun, load_run
from mmldlm.run.texts import fit_of

BUDGETS = (1, 4, 16, 64)
STEPS = (2, 5)  # times the run's own, which at its lengths take about as many passes as the two largest budgets
BATCH = 64  # latents at a time


class OtherTexts:
    """An encoder that is wrong: it returns the latents of the texts before."""

    def __init__(self, encoder: LatentEncoder):
        self._encoder = encoder

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.roll(self._encoder.encode(texts), 1, axis=0)


def measure(run: LoadedRun, sampling: SamplingConfig, limit: int | None = None) -> dict[str, Any]:
    """Generate a text of each held-out latent, or of the first `limit`, and compare it with its document."""
    split = run.store.split("test")
    flat, lengths, raw = split.gather(np.arange(len(split))[:limit])
    documents = [part.tolist() for part in np.split(flat, lengths.cumsum()[:-1])]
    latents, tokens, passes = torch.from_numpy(run.store.standardize(raw)).to(run.device), [], 0
    sampler, fit = run.sampler(sampling), fit_of(run, sampling.search)
    started = time.process_time()
    for rows in torch.arange(len(latents)).split(BATCH):
        request = TextRequest(latents[rows], run.store.manifest.max_length)
        made = generate_best(sampler, SampleStreams(0, 0, rows), request, fit)
        tokens += made.split()
        passes += made.passes
    cpu_s = time.process_time() - started
    texts, references = run.tokenizer.decode_batch(tokens), run.tokenizer.decode_batch(documents)
    return {
        "texts": len(texts),
        "passes_per_text": passes / len(texts),
        "cpu_ms_per_text": 1000 * cpu_s / len(texts),
        **reference_metrics(tokens, texts, documents, references, with_intervals=True),
        **reencoding_metrics(run.encoder.encode(texts), raw),
    }


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each way to spend passes."""
    rows = []
    for name, arm in result["arms"].items():
        low, high = arm["exact_match_ci95"]
        row = {f"{arm['texts']} held-out texts": name, "passes a text": f"{arm['passes_per_text']:.0f}"}
        row |= {"CPU ms": f"{arm['cpu_ms_per_text']:.0f}"}
        row |= {"exact matches": f"{arm['exact_match']:.3f} ({low:.3f} to {high:.3f})", "BLEU": f"{arm['bleu']:.1f}"}
        cosine = arm["reencoded_cosine"]  # null if the encoder has a latent for none of the texts
        rows.append(row | {"cosine to the latent": "-" if cosine is None else f"{cosine:.3f}"})
    return {"search": markdown(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    parser: argparse.ArgumentParser = plain_parser("search", "What a search for the text of a latent brings.")
    parser.add_argument("run", help="run folder, trained on latents whose encoder is in its store")
    parser.add_argument("--data", help="data store, if it is no longer where the run's config says")
    parser.add_argument("--limit", type=int, help="held-out texts to measure (all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of search.json (%(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    run = load_run(options.run, data=options.data)
    sampling, arms = run.config.sampling, dict[str, dict[str, Any]]()
    given = {f"`--search {budget}`": replace(sampling, search=budget) for budget in BUDGETS}
    for factor in STEPS:
        steps = factor * sampling.steps
        given[f"`sampling.steps={steps}`"] = replace(sampling, steps=steps)
    for name, config in {"default": sampling, **given}.items():
        arms[name] = measure(run, config, options.limit)
        print_status(f"{name}: exact matches {arms[name]['exact_match']:.3f}")
    run.__dict__["chooser"] = OtherTexts(run.encoder)  # in place of the cached property
    arms["`--search 16` by other texts"] = measure(run, replace(sampling, search=16), options.limit)
    result = {**circumstances(torch.device("cpu")), "data": run.store.identity, "step": run.step, "arms": arms}
    write_json(result, options.out, "search")
    print(blocks(result)["search"])
    return 0
