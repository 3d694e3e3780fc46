"""Warm start on another corpus (`init.from`): held-out bounds beside those of cold starts, over seeds.

    python -m benchmarks warm_start [--seeds 0 1] [--steps 200] [--source-steps 800] [--jobs 2] [--keep FOLDER]

Both corpora are sentences of `python-docs`: the source those of the installed packages, the target those of Python's
standard library. No source sentence is a near-duplicate of a target sentence. The target's store takes tokenizer and
encoder of the source's (`--tokenizer`, `--encoder STORE`). Every run has a learning rate schedule of its own length.
Exit code 1 if in any seed the warm start does not reach the bounds of the cold one in half of its steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import RESULTS, ROOT, circumstances, plain_parser, positive, print_status, write_json
from benchmarks.learning import mmldlm, working_folder
from mmldlm.data.prepare.dedup import near_duplicate_groups
from mmldlm.data.prepare.readers.python_docs import STANDARD_LIBRARY, read_python_docs
from mmldlm.data.store import Store
from mmldlm.evaluation import BITS, Evaluation, EvaluationConfig
from mmldlm.evaluation.evaluator import Condition
from mmldlm.evaluation.likelihood import text_bound
from mmldlm.run.load import load_run

SETTINGS = (
    "model.width=160",
    "optim.lr=2e-3",
    "train.global_batch_size=64",
    "validation.every=0",
    "log.tensorboard=false",
)
CONDITIONS: dict[str, Condition] = {"bits_alone": "none", "bits_given_latent": "own"}
HELD_OUT, TIMES = 512, 4  # target's test documents, and noise times of each


def prepare_stores(folder: Path) -> dict[str, Path]:
    """Prepare the stores `source` and `target` in `folder`."""
    stores = {name: folder / name for name in ("source", "target")}
    documents = list(read_python_docs())
    keys, _ = near_duplicate_groups([document.text for document in documents])
    is_target = [document.source.startswith(f"{STANDARD_LIBRARY}/") for document in documents]
    target_keys = {key for key, target in zip(keys, is_target, strict=True) if target}
    for name, store in stores.items():
        texts = [
            document.text
            for document, key, target in zip(documents, keys, is_target, strict=True)
            if target == (name == "target") and (target or key not in target_keys)
        ]
        (folder / f"{name}.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        given = [
            "prepare",
            str(folder / f"{name}.txt"),
            "--out",
            str(store),
            "--near-duplicates",
            "--on-problem",
            "skip",
        ]
        if name == "target":
            given += ["--tokenizer", str(stores["source"] / "tokenizer"), "--encoder", str(stores["source"])]
        mmldlm(given, folder / "prepare.log")
    return stores


def measure(stores: Mapping[str, Path], folder: Path, steps: int, source_steps: int, seed: int) -> dict[str, Any]:
    """Train the source and all arms of a seed; return CPU seconds and held-out bounds on the target by arm."""
    half, quarter, source = steps // 2, steps // 4, folder / f"source-{seed}"
    arms: dict[str, tuple[str, int, Sequence[str]]] = {
        "source": ("source", source_steps, ()),
        "cold": ("target", steps, ()),
        "cold, half": ("target", half, ()),
        "warm, half": ("target", half, (f"init.from={source}",)),
        "warm, quarter": ("target", quarter, (f"init.from={source}",)),
    }
    made = {}
    for arm, (store, length, settings) in arms.items():
        run = source if arm == "source" else folder / f"{arm.replace(', ', '-')}-{seed}"
        given = (f"run.dir={run}", f"run.seed={seed}", f"data.path={stores[store]}", f"train.steps={length}")
        command = ["train", str(ROOT / "configs/python-docs.yaml"), *SETTINGS, *given, *settings]
        spent = run.with_suffix(".cpu_s")
        # A resumed run counts its earlier time as well.
        cpu_s = mmldlm(command, folder / f"seed-{seed}.log") + (float(spent.read_text()) if spent.exists() else 0.0)
        spent.write_text(f"{cpu_s}\n")
        evaluation = Evaluation(
            load_run(run, data=str(stores["target"])), EvaluationConfig(samples=HELD_OUT, times=TIMES)
        )
        tokens = float(evaluation.lengths.sum())
        bounds = {
            name: float(text_bound(evaluation, condition).nats.sum()) / tokens * BITS
            for name, condition in CONDITIONS.items()
        }
        made[arm] = {"steps": length, "train_cpu_s": cpu_s, **bounds}
        print_status(f"seed {seed}, {arm}: {length} steps, {cpu_s:.0f} CPU s, {bounds}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = plain_parser(
        "warm_start", "Steps to the bound on another corpus, from trained weights and from random ones."
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1])
    add("--steps", type=positive, default=200, help="of the cold start (%(default)s)")
    add("--source-steps", type=positive, default=800, help="of the source (%(default)s)")
    add("--jobs", type=positive, default=os.cpu_count() or 1, help="seeds side by side (%(default)s)")
    add("--keep", type=Path, metavar="FOLDER", help="stores and runs stay there, and are resumed")
    add("--out", type=Path, default=RESULTS, help="folder of warm-start.json (%(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with working_folder(options.keep) as folder:
        stores = prepare_stores(folder)
        one = partial(measure, stores, folder, options.steps, options.source_steps)
        with ThreadPoolExecutor(options.jobs) as pool:
            seeds = dict(zip(map(str, options.seeds), pool.map(one, options.seeds), strict=True))
        sizes = {name: len(Store.open(path).split("train")) for name, path in stores.items()}
    result = {"benchmark": "warm_start", **circumstances(torch.device("cpu")), "samples": sizes, "seeds": seeds}
    write_json(result, options.out, "warm-start")
    print(json.dumps(seeds, indent=1))
    reached = [arms["warm, half"][name] <= arms["cold"][name] for arms in seeds.values() for name in CONDITIONS]
    return int(not all(reached))
