"""Paired trials: arms that differ in one thing, trained under the same seeds, and so with the same order and noise.

    python -m benchmarks trials TRIAL ARM "what it is" [key.sub=value ...] [--seeds 0 1 2] [--jobs 2] [--keep FOLDER]

Trains and evaluates one arm on a corpus of the learning gate, and adds it to TRIAL in `benchmarks/results/trials.json`.
The first arm of a trial is its baseline. An arm of other code is run in a checkout of that code, with the same `--out`.
The table has for each arm the mean difference from the baseline under the same seed, +- its standard error.
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
    "l2t.bleu": "BLEU",
    "l2t.chrf": "chrF",
    "l2t.reencoded_cosine": "re-encoded cosine",
    "t2l.cosine": "t2l cosine",
    "t2l.recall_at_1": "recall@1",
    "joint.reencoded_cosine": "joint: re-encoded",
    "joint.distinct_2": "joint: distinct-2",
}


def arm(about: str, settings: Sequence[str], seeds: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of an arm, from the contents of `evaluation.json` by seed."""
    return {
        **circumstances(torch.device("cpu")),
        "about": about,
        "settings": list(settings),
        "seeds": {str(seed): {name: value(found, name) for name in METRICS} for seed, found in seeds.items()},
    }


def add_arm(trial: str, name: str, entry: Mapping[str, Any], out: Path) -> None:
    """Add an arm to a trial in `trials.json`, or replace it."""
    path = out / "trials.json"
    trials = json.loads(path.read_text(encoding="utf-8"))["trials"] if path.exists() else {}
    trials.setdefault(trial, {})[name] = entry
    write_json({"benchmark": "trials", "trials": trials}, out, path.stem)


def trial_blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """Return a Markdown table by the name of each trial, after `trial-`."""
    made = {}
    for trial, arms in result["trials"].items():
        baseline, *others = arms
        seeds = arms[baseline]["seeds"]
        lines = [
            f"| arm ({len(seeds)} seeds) | {' | '.join(METRICS.values())} |",
            "|---" * (len(METRICS) + 1) + "|",
            f"| {arms[baseline]['about']} | "
            + " | ".join(f"{mean(seed[name] for seed in seeds.values()):.3g}" for name in METRICS)
            + " |",
        ]
        for other in others:
            pairs = [(found, seeds[seed]) for seed, found in arms[other]["seeds"].items() if seed in seeds]
            cells = []
            for name in METRICS:
                differences = [one[name] - base[name] for one, base in pairs]
                error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
                cells.append(f"{mean(differences):+.2g} ± {error:.2g}")
            lines.append(f"| {arms[other]['about']} | {' | '.join(cells)} |")
        made[f"trial-{trial}"] = "\n".join(lines)
    return made


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
    add("--out", type=Path, default=RESULTS, help="folder of trials.json (%(default)s)")
    options: argparse.Namespace = parser.parse_intermixed_args(argv)
    with working_folder(options.keep) as folder:
        store = prepare_corpus(options.corpus, folder / options.corpus)
        runs = folder / options.arm
        runs.mkdir(parents=True, exist_ok=True)
        one = partial(train_and_evaluate, CASES[options.corpus], store, runs, options.settings)
        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = {result["seed"]: result["metrics"] for result in pool.map(one, options.seeds)}
    add_arm(options.trial, options.arm, arm(options.about, options.settings, seeds), options.out)
    return 0
