"""What a user would pick instead: an autoregressive decoder of texts, given their latents.

    python -m benchmarks reference_decoder [--corpora simple-docs python-docs] [--seeds 0 1 2] [--store FOLDER]
    python -m benchmarks reference_decoder --corpora python-docs --run FOLDER

It trains as a run of the config does: on the same samples in the same order, with the same optimizer, learning rates
and number of steps. A text follows its latents and ends with a token of its own, so that it needs no length. All
documents of the split test are measured, on one thread. With `--run` nothing is trained: a run of the config on the
corpus (`python -m benchmarks learning --keep`) is measured beside the decoders, whose results stay. Its exact bits
are then of the same documents as theirs, of those that are longer than evaluations measure as well.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.causal_decoder import CausalDecoder
from benchmarks.common.report import (
    RESULTS,
    ROOT,
    circumstances,
    markdown,
    median_with_range,
    plain_parser,
    print_status,
    select_names,
)
from benchmarks.learning import CASES, CONFIG, prepare_corpus, working_folder, write_corpora
from mmldlm.config import RunConfig, load_config
from mmldlm.data.encoders import load_encoder
from mmldlm.data.loader import Loader
from mmldlm.data.nearest import draw_samples
from mmldlm.data.store import Store
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.distributed.optimizers import build_optimizer
from mmldlm.errors import UsageError
from mmldlm.evaluation import Evaluation, EvaluationConfig
from mmldlm.evaluation.l2t import fault_metrics, reencoding_metrics, reference_metrics
from mmldlm.evaluation.likelihood import MAX_ORDERED_TOKENS, SHORT, confidence_nats, text_bound
from mmldlm.evaluation.statistics import BITS, cosine, with_interval
from mmldlm.optim.lr_schedule import batch_scale, lr_at
from mmldlm.run.load import load_run
from mmldlm.utils.intervals import ratio_of_sums

NEAREST = "nearest of 5 beams"  # by the encoder, as ours is chosen among five lengths
BEAMS = {"greedy": 1, "beam of 4": 4, NEAREST: 5}
BATCH = 64  # texts that are measured together
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


def train(config: RunConfig, store: Store) -> CausalDecoder:
    """Train a decoder in place of the config's network."""
    torch.manual_seed(config.run.weights_seed)
    model, optim = CausalDecoder(config.model, store.manifest), config.optim
    optimizer = build_optimizer(model, optim)
    loader = Loader(store, "train", config.data, config.run.seed, partial(config.train.batch_at, world_size=1))
    for step, batches in loader.steps(0, config.train.steps):
        samples = sum(len(batch.lengths) for batch in batches)
        predicted = samples + sum(len(batch.tokens) for batch in batches)
        for batch in batches:
            nats = model.nats(batch.latents, batch.tokens.split(batch.lengths))
            (nats.sum() / predicted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, config.train.steps, optim, config.schedule, batch_scale(optim, samples))
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def exact_bits(nats: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Return the bits per token of documents with these nats, of all and of those as short as evaluations measure."""
    metrics: dict[str, Any] = {}
    for suffix, measured in (("", lengths > 0), (SHORT, lengths <= MAX_ORDERED_TOKENS)):
        bits = ratio_of_sums(nats[measured], lengths[measured].astype(np.float64)) * BITS
        metrics |= {f"documents{suffix}": int(measured.sum()), f"tokens{suffix}": int(lengths[measured].sum())}
        metrics |= with_interval(f"bits_per_token_with_length{suffix}", bits)
    return metrics


def measure_run(folder: Path) -> dict[str, Any]:
    """Return the exact bits of a run for all documents, tokens in the order of decoding."""
    torch.set_num_threads(1)
    run = load_run(folder)
    count = len(run.store.split("test"))
    evaluation = Evaluation(run, EvaluationConfig(samples=count, texts=count))
    nats = confidence_nats(evaluation, "own", run.store.manifest.max_length)
    nats += text_bound(evaluation, "own").length.mean(0)
    return {"seed": run.config.run.seed, "step": run.step, **exact_bits(nats, evaluation.lengths)}


def measure(config: RunConfig, store: Store, seed: int) -> dict[str, Any]:
    """Train with a seed and measure on the documents that `Evaluation` draws, in its order."""
    torch.set_num_threads(1)
    started = time.process_time()
    model = train(replace(config, run=replace(config.run, seed=seed)), store)
    train_cpu_s = time.process_time() - started
    print_status(f"{store.path.name}, seed {seed}: trained in {train_cpu_s / 60:.1f} CPU minutes")
    split, tokenizer = store.split("test"), Tokenizer.load(store.path / "tokenizer")
    encoder, words = load_encoder(store.path / "encoder"), frozenset(tokenizer.word_ids)
    flat, lengths, raw_latents = split.gather(draw_samples(split, len(split), np.random.default_rng(0)))
    documents = torch.from_numpy(flat).split(lengths.tolist())
    latents = torch.from_numpy(store.standardize(raw_latents))
    parts = [slice(start, start + BATCH) for start in range(0, len(lengths), BATCH)]
    with torch.no_grad():
        nats = torch.cat([model.nats(latents[part], documents[part]).sum(1) for part in parts]).double().numpy()
    result: dict[str, Any] = {
        "seed": seed,
        "texts": len(lengths),
        "million_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "train_cpu_minutes": train_cpu_s / 60,
        **exact_bits(nats, lengths),
    }
    print_status(f"{result}")
    true_tokens = [document.tolist() for document in documents]
    references = tokenizer.decode_batch(true_tokens)
    for name, beams in BEAMS.items():
        started = time.process_time()
        ranked = [texts for part in parts for texts in model.generate(latents[part], beams)]
        best = np.zeros(len(ranked), np.int64)
        if name == NEAREST:
            flattened = tokenizer.decode_batch([text for texts in ranked for text in texts])
            near = cosine(encoder.encode(flattened), raw_latents.repeat(beams, axis=0)).reshape(-1, beams)
            best = np.nan_to_num(near, nan=-1).argmax(1)  # the encoder has no latent of an empty text
        tokens = [texts[place] for texts, place in zip(ranked, best, strict=True)]
        cpu_s = time.process_time() - started
        texts = tokenizer.decode_batch(tokens)
        result[name] = {
            "cpu_ms_per_text": 1000 * cpu_s / len(texts),
            **reference_metrics(tokens, texts, true_tokens, references, with_intervals=True),
            **reencoding_metrics(encoder.encode(texts), raw_latents),
            **fault_metrics(tokens, true_tokens, words),
        }
    return result


def our_value(seed: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric of `ROWS` of a run of the learning gate; None if the gate has none.

    The bits are exact as the decoder's are, not the bound: of the tokens one by one in the order of decoding. The gate
    has those of all texts where none is longer than `MAX_ORDERED_TOKENS`; otherwise `measure_run` has them.
    """
    l2t, train_cpu_s = seed["metrics"]["l2t"], seed["train_cpu_s"]  # None if an earlier start was killed
    if metric == "train_cpu_minutes":
        return train_cpu_s and train_cpu_s / 60
    if metric == "bits_per_token_with_length":
        are_all = l2t["exact_match_by_length"][-1]["tokens_to"] <= MAX_ORDERED_TOKENS
        return l2t[f"bits_per_token_by_confidence{SHORT}"] + l2t["length_bits_per_token"] if are_all else None
    return l2t.get(metric)


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by name: a table for each corpus, medians over the seeds with their range, beside the gate's."""
    gate, made = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))["corpora"], {}
    for name, corpus in result["corpora"].items():
        rows, ours = list[dict[str, str]](), gate[name]["seeds"]
        decodings = [decoding for decoding in BEAMS if decoding in corpus["seeds"][0]]
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("reference_decoder", "An autoregressive decoder in place of the quickstart's network.")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings of the run config, for a trial")
    parser.add_argument("--corpora", nargs="+", help=f"some of {', '.join(CASES)} (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="store of the corpus, instead of preparing it")
    parser.add_argument(
        "--run", type=Path, action="append", metavar="FOLDER", help="measure this run, and train nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of reference_decoder.json (%(default)s)")
    options = parser.parse_intermixed_args(argv)
    names, measured = select_names("--corpora", options.corpora, list(CASES)), dict[str, Any]()
    if options.store and len(names) > 1:
        raise UsageError(f"--store: expected one corpus in --corpora, found {', '.join(names)}")
    if options.run:
        if len(names) > 1:
            raise UsageError(f"--run: expected one corpus in --corpora, found {', '.join(names)}")
        (name,) = names
        earlier = json.loads((options.out / "reference_decoder.json").read_text(encoding="utf-8"))["corpora"][name]
        runs = {"runs_by": circumstances(torch.device("cpu")), "runs": [measure_run(run) for run in options.run]}
        measured[name] = earlier | runs
        write_corpora("reference_decoder", measured, options.out)
        return 0
    with working_folder(None) as folder:
        for name in names:
            path, case = options.store or prepare_corpus(name, folder), CASES[name]
            config = load_config(ROOT / CONFIG, [f"data.path={path}", *case.settings, *options.settings])
            store = Store.open(path)
            given = {"config": CONFIG, "settings": options.settings, **circumstances(torch.device("cpu"))}
            measured[name] = {**given, "seeds": [measure(config, store, seed) for seed in options.seeds]}
    write_corpora("reference_decoder", measured, options.out)
    print("\n\n".join(blocks({"corpora": measured}).values()))
    return 0
