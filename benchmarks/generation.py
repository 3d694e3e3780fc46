"""What the texts of runs gain by the search, and what they lose if their latents are rounded, cut or noised.

    python -m benchmarks generation RUN ... [--data STORE] [--limit N]

Prints two tables, of several runs with medians and ranges, and writes OUT/generation.json. Texts are generated from the
latents of all held-out documents, on one thread. The first table has settings of the sampler, and a search that an
encoder of other texts directs. The second has changed latents: how many bits a token needs given them (an exact
likelihood, with the length), and how many texts come back. A search then looks for the changed latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import (
    RESULTS,
    circumstances,
    markdown,
    plain_parser,
    print_status,
    value_with_spread,
    write_json,
)
from benchmarks.common.text_metrics import bits, our_nats
from mmldlm.data.encoders import LatentEncoder
from mmldlm.data.store import Store
from mmldlm.diffusion.sampling import SamplingConfig
from mmldlm.errors import UsageError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.loading.load import LoadedRun, load_run

ROUNDS = (1, 2, 4, 32)
WITHOUT = "without search"
OTHERS = "default, by other texts"
COLUMNS = {  # of the table of settings: the metric and its digits
    "passes a text": ("passes_per_text", ".0f"),
    "CPU ms": ("cpu_ms_per_text", ".0f"),
    "exact matches": ("exact_match", ".3f"),
    "BLEU": ("bleu", ".1f"),
    "cosine to the latent": ("reencoded_cosine", ".3f"),  # null if the encoder has no latent for any text
}


class OtherTexts:
    """An encoder that is wrong: it returns the latents of the texts before."""

    is_small = True

    def __init__(self, encoder: LatentEncoder):
        self._encoder = encoder

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.roll(self._encoder.encode(texts), 1, axis=0)


# --- changed latents ------------------------------------------------------------------------------


def rounded(latents: np.ndarray, bits: int) -> np.ndarray:
    """Round each latent vector to whole multiples of its largest number / (2^(bits - 1) - 1)."""
    step = np.abs(latents).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(latents / step) * step).astype(np.float32)


def signs(latents: np.ndarray) -> np.ndarray:
    """Keep the sign of each number, and one size for each vector."""
    return (np.where(latents < 0, -1, 1) * np.abs(latents).mean(-1, keepdims=True)).astype(np.float32)


def changes(store: Store) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the changes of latents [n, M, C] by name. Noise is relative to the latents' spread around their mean."""
    mean, rms = np.array(store.manifest.latent.mean, np.float32), store.manifest.latent.rms

    def cut(latents: np.ndarray, share: int) -> np.ndarray:
        return np.where(np.arange(latents.shape[-1]) < latents.shape[-1] // share, latents, mean).astype(np.float32)

    def noised(latents: np.ndarray, size: float) -> np.ndarray:
        return latents + size * rms * np.random.default_rng(0).standard_normal(latents.shape, np.float32)

    return {
        "as they are, 32 bits a number": lambda latents: latents,
        "8 bits": lambda latents: rounded(latents, 8),
        "4 bits": lambda latents: rounded(latents, 4),
        "signs, 1 bit": signs,
        "half of the channels": lambda latents: cut(latents, 2),
        "a quarter of the channels": lambda latents: cut(latents, 4),
        "noise 0.1": lambda latents: noised(latents, 0.1),
        "noise 0.3": lambda latents: noised(latents, 0.3),
    }


# --- measuring ------------------------------------------------------------------------------------


def texts(evaluation: Evaluation, sampling: SamplingConfig) -> dict[str, Any]:
    """Generate a text of each latent, and compare it with the document."""
    count, started = len(evaluation.ids), process_time()
    made = evaluation.generate("l2t", "own", count, sampling, "search")
    cpu_s = process_time() - started
    generated, documents = evaluation.decode(made.tokens), evaluation.decode(evaluation.tokens)
    return {
        "texts": count,
        "passes_per_text": made.passes,
        "cpu_ms_per_text": 1000 * cpu_s / count,
        **reference_metrics(made.tokens, generated, evaluation.tokens, documents, with_intervals=True),
        **reencoding_metrics(evaluation.encode(generated), evaluation.raw_latents),
    }


def bits_of_latents(evaluation: Evaluation) -> dict[str, Any]:
    """Return the bits of a token given the latents, with the length."""
    return bits("bits_per_token", our_nats(evaluation)[0], evaluation.lengths)


def measure(run: LoadedRun, limit: int) -> dict[str, Any]:
    """Return what texts of a run are like by each setting of the sampler, and from each change of the latents."""
    encoder, default = run.encoder, run.config.sampling
    without = replace(default, search=0)
    arms = {WITHOUT: without, **{f"`--search {rounds}`": replace(default, search=rounds) for rounds in ROUNDS}}
    arms |= {"default": default, "default, one length": replace(default, tried_lengths=1)}
    arms[f"{WITHOUT}, twice the steps"] = replace(without, steps=2 * default.steps)
    evaluation = Evaluation(run, EvaluationConfig(samples=limit, texts=limit))
    settings: dict[str, Any] = {}
    for name, sampling in arms.items():
        settings[name] = texts(evaluation, sampling)
        print_status(f"{name}: exact matches {settings[name]['exact_match']:.3f}")
    run.__dict__["available_encoder"] = OtherTexts(encoder)  # in place of the cached property
    settings[OTHERS] = texts(evaluation, default)
    run.__dict__["available_encoder"] = encoder
    raw, latents = evaluation.raw_latents, dict[str, Any]()
    for name, change in changes(run.store).items():
        evaluation.raw_latents = change(raw)
        evaluation.latents["own"] = run.store.standardize(evaluation.raw_latents)
        found = {WITHOUT: texts(evaluation, without), "search": texts(evaluation, default)}
        latents[name] = bits_of_latents(evaluation) | found
        print_status(f"latents {name}: {latents[name]['bits_per_token']:.2f} bits a token")
    return {"seed": run.config.run.seed, "step": run.step, "settings": settings, "latents": latents}


# --- tables ---------------------------------------------------------------------------------------


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a row for each setting of the sampler, and for each change of the latents."""
    runs, settings, latents = result["runs"], [], []
    for name, arm in runs[0]["settings"].items():
        arms = [run["settings"][name] for run in runs]
        title = f"{arm['texts']} held-out texts, seeds: {len(runs)}"
        settings.append({title: name} | {head: value_with_spread(arms, *column) for head, column in COLUMNS.items()})
    for name in runs[0]["latents"]:
        arms = [run["latents"][name] for run in runs]
        plain, searched = ([arm[way] for arm in arms] for way in (WITHOUT, "search"))
        row = {"latents": name, "bits a token": value_with_spread(arms, "bits_per_token", ".2f")}
        row["exact matches, without search"] = value_with_spread(plain, "exact_match", ".3f")
        row["with search"] = value_with_spread(searched, "exact_match", ".3f")
        latents.append(row | {"BLEU, with search": value_with_spread(searched, "bleu", ".1f")})
    return {"search": markdown(settings), "changed-latents": markdown(latents)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("generation", "What texts gain by the search, and lose with changed latents.")
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, trained on latents whose encoder is in their store")
    add("--data", help="data store, if it is no longer where the runs' configs say")
    add("--limit", type=int, default=1_000_000, help="held-out texts to measure (all)")
    add("--out", type=Path, default=RESULTS, help="folder of generation.json (%(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    loaded = [load_run(path, data=options.data) for path in options.runs]
    if len(stores := {run.store.identity for run in loaded}) > 1:
        raise UsageError(f"RUN: expected runs of one data store, found {len(stores)}")
    runs = [measure(run, options.limit) for run in loaded]
    result = {**circumstances(torch.device("cpu")), "data": loaded[0].store.identity, "runs": runs}
    write_json(result, options.out, "generation")
    print("\n\n".join(blocks(result).values()))
    return 0
