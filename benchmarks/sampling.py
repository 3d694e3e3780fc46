"""Generated texts: tokens per second by batch size, and quality by decoding, reverse steps and temperature.

    python -m benchmarks sampling [--batches 1 8 32] [--steps 8 32] [--width 256] [--quick] [key.sub=value ...]

The network has its initial weights, which cost as much as trained ones, and latents are random; lengths are those of
sentences, not drawn by the length head. Each batch size generates the same samples in each round, in turns.

    python -m benchmarks decoding NAME=RUN [...] [--texts 200] [--steps 1 2 4 8 16 32 64] [--temperatures 0 0.6]

For each NAME: texts generated from the latents of held-out documents (l2t), compared with the documents; latents from
their texts (t2l); and the diversity of joint texts, by `sampling.joint_order`. Several runs of a NAME are seeds of one
config: rows have their means, +- standard error. The defaults of sampling follow from these tables. Every row has the
same documents and random streams. Texts per second are those of one thread. Other names keep their last tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.common.measure import compare, open_runs
from benchmarks.common.report import (
    RESULTS,
    Row,
    add_settings,
    circumstances,
    markdown,
    parse,
    parser,
    plain_parser,
    positive,
    print_status,
    report,
    work_dir,
    write_json,
)
from benchmarks.common.task import Task, device, heads_of, lengths_of, random_store
from mmldlm.data.loader import fixed_batches
from mmldlm.data.store import Store
from mmldlm.diffusion.decoding import TextDecoding
from mmldlm.diffusion.objective import Objective
from mmldlm.diffusion.sampling import SamplingConfig, generate
from mmldlm.evaluation.evaluator import Evaluation, EvaluationConfig
from mmldlm.evaluation.joint import diversity_metrics, frechet_metrics
from mmldlm.evaluation.l2t import reencoding_metrics, reference_metrics
from mmldlm.evaluation.t2l import latent_similarity_metrics
from mmldlm.model.mmdit import MMDiT
from mmldlm.run.factory import build_model, build_objective
from mmldlm.run.load import LoadedRun, load_run

# --- speed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generator:
    """Generates the texts of `samples`, rows of the store's training split, `batch` at a time."""

    model: MMDiT
    objective: Objective
    config: SamplingConfig
    store: Store
    samples: np.ndarray
    batch: int

    def step(self, number: int) -> int:
        """Generate all texts with the random numbers of `number`; return the number of tokens."""
        draw, tokens = torch.Generator().manual_seed(number), 0
        for batch in fixed_batches(self.store.split("train"), self.samples, self.batch):
            latents = batch.latents.to(device())
            text, latent = self.objective.text, self.objective.latent
            texts = generate(self.model, text, latent, "l2t", self.config, draw, latents, batch.lengths)
            tokens += len(texts.tokens)
        return tokens


@contextmanager
def open_generator(task: Task, samples: int, batch: int) -> Iterator[Generator]:
    config, store = task.config(), Store.open(task.store)
    model = build_model(config, store.manifest, device().type).to(device()).eval()
    yield Generator(model, build_objective(config, store.manifest), config.sampling, store, np.arange(samples), batch)


def measure(task: Task, batches: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    samples = max(batches)
    openers = {str(batch): partial(open_generator, task, samples, batch) for batch in dict.fromkeys(batches)}
    with open_runs(openers) as runs:
        tokens = {name: run.call(Generator.step, 0) for name, run in runs.items()}  # a first one warms up
        comparison = compare(runs, rounds, steps=1, first=1, patience=1)
    rows = []
    for name, num_tokens in tokens.items():
        speed, seconds = comparison.speed(name), comparison.seconds[name]
        rows.append(
            {
                "batch": int(name),
                "tokens/s": num_tokens / median(seconds),
                "ms a sample": 1000 * median(seconds) / samples,
                f"speed, {comparison.base} = 1": speed.median,
                "95 %": f"{speed.low:.2f} to {speed.high:.2f}",
                "tokens of a round": num_tokens,
                "first against itself": comparison.control.median,
                "trusted": comparison.trusted,
                "seconds": seconds,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("sampling", "Tokens per second of generation.")
    add_settings(options)
    options.add_argument("--batches", type=positive, nargs="+", default=[1, 8, 32])
    options.add_argument("--width", type=positive, default=256)
    options.add_argument("--depth", type=positive, default=4)
    options.add_argument("--steps", type=positive, nargs="+", default=[8, 32], help="reverse steps (%(default)s)")
    options.set_defaults(rounds=5)
    given = parse(options, argv, batches=[1, 4], steps=[2, 4], width=64, depth=2, rounds=2)
    tables = {}
    with work_dir(given) as folder:
        task = Task(
            store=str(random_store(folder / "store", lengths_of("sentences", max(given.batches)))),
            width=given.width,
            depth=given.depth,
            heads=heads_of(given.width),
            batch=1,
            precision="fp32",
            settings=tuple(given.settings),
        )
        for steps in dict.fromkeys(given.steps):
            print_status(f"{given.rounds} rounds of {steps} reverse steps")
            with_steps = replace(task, settings=(f"sampling.steps={steps}", *task.settings))
            title = f"Texts from latents, {steps} steps, {given.width} x {given.depth}"
            tables[title] = measure(with_steps, given.batches, given.rounds)
    report(given, "sampling", tables)
    return 0


# --- quality --------------------------------------------------------------------------------------

VARIETY = ("token_entropy", "distinct_2", "repetition_4")
HIDDEN = ("temperature", "chrf", "token_accuracy", "repetition_4")  # in decoding.json alone, not in the pages' tables


def text_rows(evaluation: Evaluation, settings: Sequence[SamplingConfig]) -> list[dict[str, Any]]:
    """Return the rows of l2t, one for each of `settings`."""
    count = evaluation.num_texts
    tokens, truth = evaluation.tokens[:count], evaluation.raw_latents[:count]
    references, rows = evaluation.decode(tokens), []
    for config in settings:
        start = time.process_time()
        generated = evaluation.generate("l2t", "own", count, config).tokens
        speed = count / (time.process_time() - start)
        texts = evaluation.decode(generated)
        measured = reference_metrics(generated, texts, tokens, references)
        measured |= reencoding_metrics(evaluation.encode(texts), truth)
        names = ("bleu", "chrf", "exact_match", "token_accuracy", "reencoded_cosine")
        measured |= diversity_metrics(generated)
        rows.append(
            _settings(config) | {name: measured[name] for name in (*names, "token_entropy")} | {"texts_per_s": speed}
        )
    return rows


def latent_rows(evaluation: Evaluation, settings: Sequence[SamplingConfig]) -> list[dict[str, Any]]:
    """Return the rows of t2l, one for each of `settings`."""
    rows, count = [], len(evaluation.ids)
    for config in settings:
        start = time.process_time()
        latents = evaluation.generate("t2l", "own", count, config).latents
        speed = count / (time.process_time() - start)
        measured = latent_similarity_metrics(evaluation, evaluation.run.store.restore(latents))
        rows.append(
            {"steps": config.t2l_steps, **{name: measured[name] for name in ("cosine", "recall_at_1")}}
            | {"texts_per_s": speed}
        )
    return rows


def joint_rows(evaluation: Evaluation, settings: Sequence[SamplingConfig]) -> list[dict[str, Any]]:
    """Return the rows of joint; the first is for the held-out documents themselves."""
    count = evaluation.num_texts

    def row(tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        metrics = diversity_metrics(tokens)
        return {name: metrics[name] for name in VARIETY}

    nothing = {"frechet_distance": None, "reencoded_cosine": None, "texts_per_s": None}
    rows = [
        {"order": "held out", "decoding": "", "steps": "", "temperature": ""}
        | row(evaluation.tokens[:count])
        | nothing,
    ]
    for config in settings:
        start = time.process_time()
        generated = evaluation.generate("joint", "none", count, config)
        speed = count / (time.process_time() - start)
        raw = evaluation.run.store.restore(generated.latents)
        encoded = evaluation.encode(evaluation.decode(generated.tokens))
        measured = {
            "frechet_distance": frechet_metrics(evaluation, generated.latents)["frechet_distance"],
            "reencoded_cosine": reencoding_metrics(encoded, raw)["reencoded_cosine"],
            "texts_per_s": speed,
        }
        rows.append({"order": config.joint_order} | _settings(config) | row(generated.tokens) | measured)
    return rows


def _settings(config: SamplingConfig) -> dict[str, Any]:
    return {"decoding": config.decoding, "steps": config.steps, "temperature": config.temperature}


def tables_of(
    name: str, run: LoadedRun, texts: int, steps: Sequence[int], temperatures: Sequence[float]
) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of l2t, t2l and joint of a run, on its test split."""
    evaluation = Evaluation(run, EvaluationConfig(samples=2 * texts, texts=texts))
    decodings, orders = get_args(TextDecoding), ("together", "latents_first")
    texts_by = [SamplingConfig(*each) for each in product(steps, temperatures)]
    rows = {
        "l2t": (text_rows, [replace(each, decoding=decoding) for decoding in decodings for each in texts_by]),
        "t2l": (latent_rows, [SamplingConfig(t2l_steps=count) for count in steps]),
        "joint": (
            joint_rows,
            [
                replace(each, decoding=decoding, joint_order=order)
                for order, decoding in product(orders, decodings)
                for each in texts_by
            ],
        ),
    }
    tables = {}
    for mode, (measure, settings) in rows.items():
        print_status(f"{mode}, {name}")
        tables[f"{mode}, {name}"] = measure(evaluation, settings)
    return tables


def mean_rows(of_runs: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """Return the rows of one table with the means over runs; `of_runs` has the values."""
    rows = []
    for same in zip(*of_runs, strict=True):
        values = {key: [row[key] for row in same] for key in same[0] if isinstance(same[0][key], float)}
        values.pop("temperature", None)
        rows.append({**same[0], **{key: mean(each) for key, each in values.items()}, "of_runs": values})
    return rows


def _shown(row: Row) -> dict[str, Any]:
    """Return the main columns of a row, means with their standard errors, except that of the speed."""
    errors = {
        key: f" ± {stdev(each) / len(each) ** 0.5:.1g}"
        for key, each in row.get("of_runs", {}).items()
        if key != "texts_per_s" and len(each) > 1
    }
    columns = {key: value for key, value in row.items() if key not in HIDDEN}
    return {**columns, **{key: f"{row[key]:.3g}{error}" for key, error in errors.items() if key in columns}}


def _named(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN, found {text!r}")
    return name, Path(folder)


def decoding_blocks(result: dict[str, Any]) -> dict[str, str]:
    """Return Markdown tables by name, for `pages.all_blocks`."""
    blocks = []
    for entry in result["names"].values():
        of_what = f"{entry['runs']} {'run' if entry['runs'] == 1 else 'seeds'}, {entry['texts']} texts"
        for title, rows in entry["tables"].items():
            highest = max((row["temperature"] for row in rows if row.get("temperature")), default=None)
            shown = [_shown(row) for row in rows if row.get("temperature", highest) in (highest, "")]
            blocks.append(f"{title}, {of_what}:\n\n{markdown(shown)}")
    return {"decoding": "\n\n".join(blocks)}


def decoding_main(argv: Sequence[str] | None = None) -> int:
    runs_parser = plain_parser("decoding", "Quality of texts by decoding.")
    runs_parser.add_argument(
        "runs", nargs="+", type=_named, metavar="NAME=RUN", help="run folders, and their names in the tables"
    )
    runs_parser.add_argument("--texts", type=positive, default=200, help="texts of each row (%(default)s)")
    runs_parser.add_argument("--steps", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    runs_parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    runs_parser.add_argument("--out", type=Path, default=RESULTS, help="folder of decoding.json")
    options = runs_parser.parse_args(argv)
    path = options.out / "decoding.json"
    names = json.loads(path.read_text(encoding="utf-8"))["names"] if path.exists() else {}
    for name in dict.fromkeys(name for name, _ in options.runs):
        runs = [load_run(folder) for other, folder in options.runs if other == name]
        measured = [tables_of(name, run, options.texts, options.steps, options.temperatures) for run in runs]
        tables = {title: mean_rows([one[title] for one in measured]) for title in measured[0]}
        names[name] = {**circumstances(runs[0].device), "texts": options.texts, "runs": len(runs), "tables": tables}
    result = {"benchmark": "decoding", "names": names}
    write_json(result, options.out, path.stem)
    print(decoding_blocks(result)["decoding"])
    return 0
