"""Paired trials: arms that differ in one thing, trained under the same seeds, and so with the same order and noise.

    python -m benchmarks trials TRIAL ARM "what it is" [key.sub=value ...] [--seeds 0 1 2] [--jobs 2] [--keep FOLDER]
        [--prepare=--encoder=learned ...]

Trains and evaluates one arm on a corpus of the learning gate, and adds it to TRIAL in `benchmarks/results/trials.json`.
The first arm of a trial is its baseline. An arm of other code is run in a checkout of that code, with the same `--out`;
one with options of `mmldlm prepare` has a store of its own. One table has for each arm the mean difference from the
baseline under the same seed, +- its standard error, the other the values themselves.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.common.report import RESULTS, circumstances, plain_parser, positive, write_json
from benchmarks.learning import CASES, prepare_corpus, train_and_evaluate, value, working_folder

METRICS = {  # title by name in `evaluation.json`
    "bits_per_token": "bits, text alone",
    "l2t.bits_per_token": "bits given the latent",
    "l2t.length_bits_per_token": "bits of the length given the latent",
    "l2t.bleu": "BLEU",
    "l2t.exact_match": "exact matches",
    "l2t.chrf": "chrF",
    "l2t.reencoded_cosine": "re-encoded cosine",
    "t2l.cosine": "t2l cosine",
    "t2l.cosine_ridge": "t2l cosine of ridge",
    "t2l.recall_at_1": "recall@1",
    "t2l.recall_at_1_ridge": "recall@1 of ridge",
    "joint.reencoded_cosine": "joint: re-encoded",
    "joint.distinct_2": "joint: distinct-2",
    "joint.token_entropy": "joint: entropy",
    "joint.frechet_distance": "joint: Frechet distance",
}


def arm(
    about: str, settings: Sequence[str], prepare: Sequence[str], prepare_s: float, seeds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the entry of an arm, from its options, the CPU seconds of its preparation, and its seeds' results."""
    return {
        **circumstances(torch.device("cpu")),
        "about": about,
        "settings": list(settings),
        "prepare": list(prepare),
        "prepare_cpu_s": prepare_s,
        "seeds": {
            str(seed["seed"]): {
                **{name: value(seed["metrics"], name) for name in METRICS},
                "train_cpu_s": seed["train_cpu_s"],
            }
            for seed in seeds
        },
    }


def add_arm(trial: str, name: str, entry: Mapping[str, Any], out: Path) -> None:
    """Add an arm to a trial in `trials.json`, or replace it."""
    path = out / "trials.json"
    trials = json.loads(path.read_text(encoding="utf-8"))["trials"] if path.exists() else {}
    trials.setdefault(trial, {})[name] = entry
    write_json({"benchmark": "trials", "trials": trials}, out, path.stem)


def trial_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return two Markdown tables for each trial: `trial-NAME` of differences, `values-NAME` of values."""
    made = {}
    for trial, arms in result["trials"].items():
        baseline, *others = arms
        seeds = arms[baseline]["seeds"]
        # Arms of earlier versions lack metrics that were added later, and few texts have no Frechet distance.
        metrics = {
            name: title
            for name, title in METRICS.items()
            if all(seed.get(name) is not None for entry in arms.values() for seed in entry["seeds"].values())
        }
        lines = [
            f"| arm ({len(seeds)} seeds) | {' | '.join(metrics.values())} |",
            "|---" * (len(metrics) + 1) + "|",
            f"| {arms[baseline]['about']} | "
            + " | ".join(f"{mean(seed[name] for seed in seeds.values()):.3g}" for name in metrics)
            + " |",
        ]
        for other in others:
            pairs = [(found, seeds[seed]) for seed, found in arms[other]["seeds"].items() if seed in seeds]
            cells = []
            for name in metrics:
                differences = [one[name] - base[name] for one, base in pairs]
                error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
                cells.append(f"{mean(differences):+.2g} ± {error:.2g}")
            lines.append(f"| {arms[other]['about']} | {' | '.join(cells)} |")
        made[f"trial-{trial}"] = "\n".join(lines)
        made[f"values-{trial}"] = _values_table(arms, metrics)
    return made


def _values_table(arms: Mapping[str, Any], metrics: Mapping[str, str]) -> str:
    """Return a row for each metric with the mean and the extremes of each arm, and the CPU minutes that it took."""
    lines = [f"| | {' | '.join(entry['about'] for entry in arms.values())} |", "|---" * (len(arms) + 1) + "|"]
    for name, title in metrics.items():
        columns = [[seed[name] for seed in entry["seeds"].values()] for entry in arms.values()]
        cells = [f"{mean(column):.3g} ({min(column):.3g} to {max(column):.3g})" for column in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    if all("prepare_cpu_s" in entry for entry in arms.values()):
        for title, minutes in (
            ("CPU minutes of `prepare`", [entry["prepare_cpu_s"] / 60 for entry in arms.values()]),
            ("CPU minutes of training", [mean(_train_s(entry)) / 60 for entry in arms.values()]),
        ):
            lines.append(f"| {title} | {' | '.join(f'{each:.1f}' for each in minutes)} |")
    return "\n".join(lines)


def _train_s(entry: Mapping[str, Any]) -> list[float]:
    return [seed["train_cpu_s"] for seed in entry["seeds"].values()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser("trials", "Train one arm of a paired trial.")
    add = parser.add_argument
    add("trial", help="name of the trial")
    add("arm", help="name of the arm")
    add("about", help="what it is, for the table")
    add("settings", nargs="*", metavar="key.sub=value", help="settings of the run config")
    add("--corpus", choices=list(CASES), default=next(iter(CASES)), help="corpus of the learning gate (%(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--jobs", type=positive, default=os.cpu_count() or 1, help="seeds side by side (%(default)s)")
    add("--keep", type=Path, metavar="FOLDER", help="store and runs stay there, and are resumed")
    add("--prepare", action="append", default=[], metavar="OPTION", help="of mmldlm prepare, such as --encoder=learned")
    add("--out", type=Path, default=RESULTS, help="folder of trials.json (%(default)s)")
    options: argparse.Namespace = parser.parse_intermixed_args(argv)
    with working_folder(options.keep) as folder:
        runs = folder / options.arm
        runs.mkdir(parents=True, exist_ok=True)
        own = runs if options.prepare else folder / options.corpus
        store, prepare_s = prepare_corpus(options.corpus, own, options.prepare)
        one = partial(train_and_evaluate, CASES[options.corpus], store, runs, options.settings)
        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = list(pool.map(one, options.seeds))
    entry = arm(options.about, options.settings, options.prepare, prepare_s, seeds)
    add_arm(options.trial, options.arm, entry, options.out)
    return 0
